"""Low-rank adapters: which tokens of a step have which, and what these add to a product with weights."""
