"""The Redis server that ``pagebus serve`` starts: startup, repair after a crash, a small append-only file."""
