"""``pagebus bench``: measures deployments over the bus, OpenAI-style servers over HTTP, and startup."""
