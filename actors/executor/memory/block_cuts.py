"""Cuts the heads that a rank needs out of blocks of other ranks, which hold more heads or different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagebus.bus.messages import Int32Array

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """``count`` heads of a part of a block. In the lender's block the part begins at byte ``source_offset`` and has
    ``source_count`` heads; the wanted ones begin at head ``source``. ``target_offset``, ``target_count`` and ``target``
    say the same of the rank's own block."""

    rows: int
    head_bytes: int
    count: int
    source: int
    source_offset: int
    source_count: int
    target: int
    target_offset: int
    target_count: int


def put(own: torch.Tensor, targets: Int32Array, staged: torch.Tensor, cuts: Sequence[Cut]) -> None:
    """Copy the heads of staged blocks [N, bytes] into blocks ``targets`` [N] of ``own`` [num_blocks, bytes], both of
    uint8."""
    places = torch.from_numpy(targets.astype(np.int64)).to(own.device)
    for cut in cuts:
        sizes = cut.source_offset, cut.target_offset, cut.head_bytes, own.shape[1], staged.shape[1]
        dtype = torch.uint8 if any(each % WORD_BYTES for each in sizes) else torch.int64
        source = _heads(staged, cut.source_offset, cut.source_count, cut, dtype)
        target = _heads(own, cut.target_offset, cut.target_count, cut, dtype)
        found = source[: len(places), :, cut.source : cut.source + cut.count]
        target[:, :, cut.target : cut.target + cut.count][places] = found


def _heads(blocks: torch.Tensor, offset: int, count: int, cut: Cut, dtype: torch.dtype) -> torch.Tensor:
    """A part of blocks [N, rows, heads, words of a head]."""
    part = blocks[:, offset : offset + cut.rows * count * cut.head_bytes]
    words: torch.Tensor = part.view(dtype).view(len(blocks), cut.rows, count, -1)
    return words
