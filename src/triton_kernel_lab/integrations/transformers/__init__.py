"""The kernels in a Hugging Face Llama or Qwen model: replace its modules, or decode it as one CUDA graph."""

from __future__ import annotations

from triton_kernel_lab.integrations.transformers._decoder import Decoder
from triton_kernel_lab.integrations.transformers._patch import PatchReport, patch, patch_report, unpatch

__all__ = ["Decoder", "PatchReport", "patch", "patch_report", "unpatch"]
