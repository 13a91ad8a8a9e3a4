"""The program ``triton-kernel-nsight``: the command ``nsight`` under a name of its own."""

from __future__ import annotations

import sys

from triton_kernel_lab import cli

__all__ = ["main"]


def main() -> None:
    """Run ``triton-kernel-lab nsight`` with the arguments that were given."""
    sys.argv[1:1] = ["nsight"]
    cli.main()
