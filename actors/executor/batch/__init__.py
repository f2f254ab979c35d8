"""The persistent batch on host and device: the changes that a step plan makes, and the definition of a step."""
