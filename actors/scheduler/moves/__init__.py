"""Blocks that move between replicas: links, pulls, and replicas that leave."""
