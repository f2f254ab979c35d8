"""State that outlives a scheduler: its journal and checkpoints, and the takeover by a successor."""
