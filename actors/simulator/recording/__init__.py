"""Traces of real deployments: their format, recorder and plots."""
