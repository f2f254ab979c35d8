"""Matrix products: kernels for few and many rows, and the measured table that chooses one."""
