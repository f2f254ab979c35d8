"""Telemetry of actors: logs, metrics, traces."""
