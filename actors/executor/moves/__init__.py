"""Blocks that move: an executor reads blocks of its cache from those of other executors, as plans order."""
