"""The ranks of a replica: how they find each other, exchange tensors, and notice that one is lost."""
