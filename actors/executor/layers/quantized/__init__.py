"""Quantized weights of layers: which layouts they become, and what fills them."""
