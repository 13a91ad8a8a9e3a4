"""The yardstick of each operator: inputs, oracle, baselines, cost, shapes."""

KERNELS: list[str] = [
    "rms_norm",
    "rms_norm_backward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "swiglu",
    "swiglu_backward",
    "qk_scores",
    "paged_kv_gather",
    "selected_attention",
    "int4_linear",
    "swiglu_linear",
    "flash_attention",
]

PENDING: list[str] = []
"""Operators with a case and tests but no tracked measurement yet: no stage runs for them, and no table has them."""
