"""``pagebus bench``: measures a deployment of our own over the bus, any OpenAI-style server over HTTP, and a start."""
