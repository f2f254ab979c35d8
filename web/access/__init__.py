"""Access: API keys, permitted hosts and origins, and limits on load."""
