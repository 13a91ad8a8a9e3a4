"""Where the tests run: on the GPU, or in Triton's interpreter where there is none."""

import os

import torch

# Triton looks at this when a kernel is decorated, so it must stand before any test imports one.
if torch.cuda.device_count() == 0:
    os.environ["TRITON_INTERPRET"] = "1"
