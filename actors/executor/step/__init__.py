"""One step: run on the device, read back, its result published."""
