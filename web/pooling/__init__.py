"""Scores, rankings and classes of texts: their bodies, and which of them a model serves."""
