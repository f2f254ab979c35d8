"""Memory: the size of the KV cache, the cache itself, the host tier and copies to it."""
