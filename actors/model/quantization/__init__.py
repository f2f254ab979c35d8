"""Quantized checkpoints without their weights: what a configuration says of each product's format."""
