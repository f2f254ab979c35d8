"""Drafts of a replica: how many are planned, and how many are accepted."""
