"""Drafts of a replica: how many are planned, and what became of them."""
