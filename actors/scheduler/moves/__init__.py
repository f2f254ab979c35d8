"""Blocks that move between replicas: who lends which to whom, and what becomes of it."""
