"""The bus: typed messages between actors, its contract, and the two implementations of it."""
