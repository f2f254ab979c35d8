"""Matrix products of a step: kernels for few and many rows, and the measured table that chooses among them."""
