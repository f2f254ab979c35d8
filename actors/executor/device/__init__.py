"""The device: its number format, its operations, its limits, and what ends an engine."""
