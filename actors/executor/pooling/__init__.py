"""Layers of encoders, and what turns pooled hidden states into embeddings and scores."""
