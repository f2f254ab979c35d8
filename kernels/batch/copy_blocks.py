"""Copies whole cache blocks on the device (copy-on-write of a shared block)."""

from __future__ import annotations

import torch


def copy_blocks_reference(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """cache[targets[i]] = cache[sources[i]] for every i, all reads before all writes.

    cache [num_blocks, ...] contiguous, sources and targets [C] int32 or int64; targets are distinct.
    """
    words = cache.flatten(1).view(torch.int64)  # of any format; a block has 16 tokens, so it is whole words
    words.index_copy_(0, targets.long(), words.index_select(0, sources.long()))


# Whole blocks are long contiguous pieces: torch's own gather and scatter already run at copy speed.
copy_blocks = copy_blocks_reference
