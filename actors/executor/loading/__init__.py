"""Startup of an engine: loading weights, compiling kernels ahead, warm-up."""
