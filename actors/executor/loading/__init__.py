"""Getting an engine ready: weights, kernels compiled ahead, warm-up."""
