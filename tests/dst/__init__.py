"""Whole systems on virtual time, with faults drawn from a seed: any run can be had again (`python -m tests.dst`)."""
