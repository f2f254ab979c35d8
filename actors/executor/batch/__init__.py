"""The persistent batch, host and device side: what a step plan changes, and what a step is."""
