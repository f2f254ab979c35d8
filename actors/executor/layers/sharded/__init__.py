"""Layers that ranks compute together, where each has a part: the vocabulary, and norms over all heads."""
