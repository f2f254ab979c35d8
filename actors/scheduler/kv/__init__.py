"""The block pools of the KV cache, per tier: ownership, reference counts, and the prefix index."""
