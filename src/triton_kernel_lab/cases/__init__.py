"""The yardstick of each operator: inputs, oracle, baselines, cost, shapes."""

KERNELS: list[str] = ["rms_norm", "swiglu"]
