"""Attention over the paged cache: one kernel for each kind of step, and the plans that share it out."""
