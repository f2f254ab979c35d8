"""Sampling: tokens and log probabilities from logits, within grammars."""
