"""The life of one step: launched on the device, read back, its result sent."""
