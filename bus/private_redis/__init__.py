"""A Redis server of our own: started, repaired after a crash, and its append-only file kept small."""
