"""Products of layers to which adapters add, in the passes in which some token has one."""
