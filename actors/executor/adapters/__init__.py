"""Adapters of an executor: read beside steps, copied into blocks of a cache, and told apart by the slots of a step."""
