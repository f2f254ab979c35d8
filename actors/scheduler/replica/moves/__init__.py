"""What a replica knows of blocks that move: its loans, the pulls of its next plan, its counts."""
