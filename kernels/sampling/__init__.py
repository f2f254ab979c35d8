"""Kernels from logits to tokens: masks, biases, penalties, limits, noise and log probabilities."""
