"""A replica's part in moving blocks: loans, the pulls of its next plan, and counts."""
