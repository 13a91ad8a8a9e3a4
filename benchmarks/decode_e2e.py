"""Tokens a second of a whole model beside eager, torch.compile and Liger; writes artifacts/<runner>/decode_e2e.json."""

from __future__ import annotations

import sys

from triton_kernel_lab.decode_e2e import main

if __name__ == "__main__":
    sys.exit(main())
