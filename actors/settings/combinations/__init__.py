"""Settings that only make sense together, one file per group."""
