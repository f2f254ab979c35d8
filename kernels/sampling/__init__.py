"""Sampling: token masks, logit bias, penalties, limits, noise and logprobs."""
