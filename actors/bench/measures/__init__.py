"""Measurement results: steps, their costs, figures and timelines."""
