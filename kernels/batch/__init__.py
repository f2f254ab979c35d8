"""Changes to the persistent batch on the device: inputs of a step, tables, copied blocks."""
