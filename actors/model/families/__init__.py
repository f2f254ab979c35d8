"""The families that are served, as data: one file says how a configuration becomes a spec, and what weights are called.

A family has no forward pass of its own.
"""
