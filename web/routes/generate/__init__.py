"""Routes that generate tokens, or render requests to tokens."""
