"""Updates of the persistent batch on the device: step inputs, block tables, block copies."""
