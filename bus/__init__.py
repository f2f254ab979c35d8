"""The bus: typed messages between actors, the contract that carries them, and what keeps it."""
