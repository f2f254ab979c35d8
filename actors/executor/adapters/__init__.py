"""Adapters of an executor: read beside steps, copied into blocks of the cache, told apart by the slots of a step."""
