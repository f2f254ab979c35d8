"""Traces of real deployments: their format, how they are recorded and shown."""
