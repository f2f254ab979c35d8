"""Whole systems on virtual time, with faults drawn from a seed: every run can be repeated (`python -m tests.dst`)."""
