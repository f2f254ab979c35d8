"""What comes from host memory into blocks of the cache beside the steps, other than blocks of the host tier."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.bus.messages import Int32Array
from pagebus.bus.messages.field_types import no_ints


class BlockLoad(NamedTuple):
    """Bytes for ``block``: ``source`` [n], on the host, pinned where devices copy, comes to ``target``, a number of
    bytes behind the beginning of the cache."""

    block: int
    target: int
    source: torch.Tensor


class Loads(NamedTuple):
    """``loads`` that begin with a plan, and the ``needed`` blocks: its pass reads what has come, or comes, to these."""

    loads: list[BlockLoad]
    needed: Int32Array


def no_loads() -> Loads:
    """The usual case."""
    return Loads([], no_ints())
