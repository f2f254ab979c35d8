"""Memory: how many blocks there are, the cache itself, the host tier and copies to it."""
