"""Routes that have tokens computed, or rendered as if."""
