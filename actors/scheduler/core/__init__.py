"""The pure core: the lives of requests, who gets a slot and where, who is told."""
