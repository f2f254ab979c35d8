"""Telemetry of all actors: logs, metrics and traces."""
