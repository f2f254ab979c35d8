"""Products for Hopper whose warps are specialized: some load weights, others multiply."""
