"""The actors, one folder each, and their shared code: runtime, telemetry, settings, model, commands."""
