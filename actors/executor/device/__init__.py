"""The device: its number format, its operations, its limits, and the errors that end an engine."""
