"""Measurements: observed steps, their costs, figures and timelines."""
