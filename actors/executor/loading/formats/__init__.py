"""Formats of quantized checkpoints: what tensors each has, and what becomes of them in our layouts."""
