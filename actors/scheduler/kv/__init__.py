"""Blocks of the key-value cache, by tier: who holds them, and what content can be found."""
