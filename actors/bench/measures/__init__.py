"""What was measured: steps as they were watched, their costs, figures and timelines."""
