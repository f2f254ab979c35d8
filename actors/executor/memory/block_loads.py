"""Copies from host memory into blocks of the cache beside the steps, other than those of the host tier: adapters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.bus.messages import Int32Array
from pagebus.bus.messages.field_types import no_ints


class BlockLoad(NamedTuple):
    """Bytes for ``block``: ``source`` [n], in host memory (pinned, for a GPU), is copied to byte ``target`` of the
    cache."""

    block: int
    target: int
    source: torch.Tensor


class Loads(NamedTuple):
    """``loads`` that begin with a plan, and the blocks that its pass reads (``needed``): it waits for their loads."""

    loads: list[BlockLoad]
    needed: Int32Array


def no_loads() -> Loads:
    """The usual case."""
    return Loads([], no_ints())
