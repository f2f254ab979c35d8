"""Weights of 8 and 4 bits inside kernels of products: how numbers become 16 bits, and what a tile adds up."""
