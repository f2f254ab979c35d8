"""CUDA graphs of whole steps and of pieces of steps."""
