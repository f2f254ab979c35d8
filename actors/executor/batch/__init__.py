"""The persistent batch on host and device: step plans change it, and each step reads it."""
