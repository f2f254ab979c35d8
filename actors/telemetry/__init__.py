"""What actors say of themselves: logs, metrics, traces."""
