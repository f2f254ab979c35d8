"""The pure core: the life of requests, admission and placement of sequences, and delivery of their output."""
