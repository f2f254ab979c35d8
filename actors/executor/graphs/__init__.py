"""CUDA graphs of whole steps, of pieces of steps, and of passes of a draft head."""
