"""Loading an engine: weights, kernels compiled ahead, warm-up."""
