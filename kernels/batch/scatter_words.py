"""Writes scattered words of a flat array: a step's changes to the tables of the persistent batch."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def scatter_words_reference(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """words[places[i]] = values[i] for every i. words [W], places (all different) and values [N], int32."""
    words[places.long()] = values


@triton.jit(do_not_specialize=["places_ptr", "values_ptr", "count"])
def _scatter_words_kernel(
    words_ptr,  # [W]
    places_ptr,  # [N]
    values_ptr,  # [N]
    count,  # N
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + index, mask=index < count, other=0)
    tl.store(words_ptr + place, tl.load(values_ptr + index, mask=index < count), mask=index < count)


def scatter_words(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """words[places[i]] = values[i] for every i; see `scatter_words_reference`."""
    assert words.dtype == places.dtype == values.dtype == torch.int32
    assert places.shape == values.shape
    assert words.is_contiguous()
    assert places.is_contiguous()
    assert values.is_contiguous()
    count = len(places)
    if count:
        block = 256
        _scatter_words_kernel[(-(-count // block),)](words, places, values, count, BLOCK=block, num_warps=4)
