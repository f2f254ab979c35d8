"""Calls under way, and the details of their answers."""
