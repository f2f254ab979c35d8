"""Measuring products of quantized weights: random weights of a layout, and what `pagebus tune` asks of them."""
