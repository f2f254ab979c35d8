"""The families whose layers have experts, as data."""
