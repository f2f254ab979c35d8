"""Sampling: from logits to tokens and log probabilities, under token masks."""
