"""Carriers read the blocks of another executor's cache: over shared memory, CUDA's memory handles, or TCP."""
