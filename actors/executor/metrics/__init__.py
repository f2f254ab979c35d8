"""What an executor measures of itself: steps, kernels, experts, graphs and memory, as metrics.

Nothing here imports torch: the metrics are there before it.
"""
