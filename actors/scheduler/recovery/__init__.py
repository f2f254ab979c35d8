"""State that outlives a scheduler: its journal and checkpoints, and their takeover by a successor."""
