"""What kernels need, as the compiler gave it ahead of time, and the text of the tables that hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Resources(NamedTuple):
    """``registers`` of a thread, ``spilled`` bytes of it, and bytes of ``shared`` memory of a program."""

    registers: int
    spilled: int
    shared: int


def take_resources(fields: dict[str, Any]) -> Resources:
    """Those among the fields of a line, which keeps the others."""
    return Resources(**{name: fields.pop(name) for name in Resources._fields})


def table_text(capability: int, triton: str, lines: Iterable[Mapping[str, Any]]) -> str:
    """A table for GPUs of this capability, by this version of Triton: a line for each variant of the kernels."""
    head = f'{{"capability": {capability}, "triton": {json.dumps(triton)}, "variants": [\n'
    return head + ",\n".join(map(json.dumps, lines)) + "\n]}\n"
