"""Routes that generate tokens, or render and tokenize only."""
