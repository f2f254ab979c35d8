"""Calls in progress, and the details of their answers."""
