"""Experts to which adapters add: a pair of a token and an expert takes the matrices of its adapter for that expert."""
