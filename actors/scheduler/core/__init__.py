"""The pure core: request life cycle, admission, placement, and delivery of sequences to detokenizers."""
