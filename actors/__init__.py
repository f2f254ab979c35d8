"""The actors, one folder each, and what they share: runtime, telemetry, settings, model, commands."""
