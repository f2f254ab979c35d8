"""What is wrong with a model."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be served; the text names the model and what is wrong with it."""
