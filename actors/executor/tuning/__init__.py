"""Tuning within a step: launch shapes with which the decode step of a short model of that shape is faster."""
