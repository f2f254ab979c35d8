"""Products for Hopper whose warps are specialized: some load or widen weights, others multiply."""
