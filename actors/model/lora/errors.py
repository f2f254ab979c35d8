"""Why an adapter cannot be used."""

from __future__ import annotations


class AdapterError(ValueError):
    """An adapter that is broken, does not fit the model, or asks for what is not served; the text says which."""


class NoAdapter(AdapterError):
    """There is no adapter at this path."""
