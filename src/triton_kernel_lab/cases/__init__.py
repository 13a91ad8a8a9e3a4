"""The yardstick of each operator: inputs, oracle, baselines, cost, shapes."""

KERNELS: list[str] = ["rms_norm", "swiglu", "qk_scores", "paged_kv_gather"]

PENDING: list[str] = ["add_rms_norm", "selected_attention", "int4_linear", "swiglu_linear", "flash_attention"]
"""Operators with a case and tests but no tracked measurement yet: no stage runs for them, and no table has them."""
