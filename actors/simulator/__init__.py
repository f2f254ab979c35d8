"""Runs the scheduler's core against modelled executors on a virtual clock, and records traces of real deployments.

The one package besides the scheduler that imports :mod:`pagebus.actors.scheduler`: what is simulated is the very same
core.
"""
