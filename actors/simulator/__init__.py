"""Runs the scheduler's core against modelled executors on a virtual clock.

Besides the scheduler, only this package imports :mod:`pagebus.actors.scheduler`: it simulates the same core that runs
in production.
"""
