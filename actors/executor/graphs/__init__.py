"""CUDA graphs of whole steps and of their pieces."""
