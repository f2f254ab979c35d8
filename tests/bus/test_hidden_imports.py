"""Optional packages that are not to be imported."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from pagebus.bus.hidden_imports import hide_imports


def test_a_hidden_package_is_not_found_in_the_block_only() -> None:
    """One that is there already stays, and afterwards all can be imported."""
    sys.modules.pop("wave", None)

    with hide_imports("wave", "json"):
        with pytest.raises(ImportError):
            importlib.import_module("wave")
        assert importlib.import_module("json") is json

    assert importlib.import_module("wave").__name__ == "wave"
