"""The device: its number format, operations, limits and errors."""
