"""What outlives a scheduler: its journal, its checkpoints, and how a successor takes over."""
