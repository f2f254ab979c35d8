"""Attention over the paged cache: one kernel per kind of step, and the plans that divide its work."""
