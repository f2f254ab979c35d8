"""Attention over latents: keys and values of all heads as one short vector per token."""
