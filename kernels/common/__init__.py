"""Common parts of the kernels: the GPU target, dependent launches, Triton itself, one-byte formats."""
