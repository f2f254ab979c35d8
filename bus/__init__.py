"""The bus: typed messages between actors, the contract that carries them, and its implementations."""
