"""The pure state of one replica: its slots and blocks, its step plans, and their results."""
