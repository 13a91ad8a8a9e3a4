"""The operators: one a file, Triton kernel, launcher and torch.library op."""
