"""What all kernels share: the kind of GPU, dependent launches, Triton itself, one-byte formats."""
