"""Quantized weights: the three layouts that every format becomes at load, and their products."""
