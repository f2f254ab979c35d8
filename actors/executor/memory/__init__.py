"""Memory: sizes the KV cache, holds it, and copies blocks to and from the host tier."""
