"""Blocks of the KV cache in both tiers: their owners, and the index that finds cached content."""
