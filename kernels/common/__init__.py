"""Code shared by all kernels: GPU targets, dependent launches, Triton itself, one-byte formats."""
