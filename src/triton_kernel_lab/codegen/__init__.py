"""The codegen audit: what the compiler makes of each kernel for each target, read without a GPU."""
