"""The names of vLLM's routes, fields and flags, which docs/compatibility must list: see ``extract.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("names.json")


def stored() -> Mapping[str, Any]:
    """What ``extract.py`` found last: ``version``, ``routes`` (a route's fields by ``POST /path``) and ``flags``."""
    names: Mapping[str, Any] = json.loads(STORED.read_text())
    return names


def fields_of(*routes: str) -> frozenset[str]:
    """The fields of bodies and queries of some of the routes."""
    return frozenset(name for route in routes for name in stored()["routes"][route])
