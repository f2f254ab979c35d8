"""The ways to the blocks of another executor's cache: shared memory, CUDA's handles of memory, and TCP."""
