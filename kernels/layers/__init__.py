"""Kernels between attention and matrix products: norms, embeddings, rotation and cache writes."""
