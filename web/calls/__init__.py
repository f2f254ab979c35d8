"""Calls under way, and the details that their answers tell."""
