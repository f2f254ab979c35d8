"""``pagebus chat``, ``complete`` and ``top``: clients of a server in the terminal."""
