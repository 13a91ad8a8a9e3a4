"""The yardstick of each operator: inputs, oracle, baselines, cost, shapes."""

KERNELS: list[str] = [
    "rms_norm",
    "rms_norm_backward",
    "add_rms_norm",
    "swiglu",
    "swiglu_backward",
    "swiglu_linear",
    "qk_scores",
    "paged_kv_gather",
    "selected_attention",
    "int4_linear",
    "flash_attention",
]
