"""What simulated machines answer in place of a model."""
