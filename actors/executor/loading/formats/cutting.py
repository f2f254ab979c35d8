"""The part of a module's codes that a rank keeps: rows or columns, with the scales that belong to them."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebus.actors.executor.loading.formats.reading import Codes
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.model.shards.cuts import Cut


def own_codes(codes: Codes, cut: Cut | None, scheme: Scheme, dim: int) -> Codes:
    """What ``cut`` takes of the ``codes`` of a weight [N, K], whose rows are the tensor's dimension ``dim``. Groups and
    blocks are whole. What is one for all rows, or for all columns, stays."""
    if cut is None:
        return codes
    axis = cut.dim - dim
    unit = max(1, scheme.block[axis]) if axis == 0 else scheme.block[1] or cut.whole
    groups = [range(each.start // unit, -(-each.stop // unit)) for each in cut.ranges]

    def shared(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or tensor.shape[axis] == 1 else _taken(tensor, groups, axis)

    scale = shared(codes.scale)
    assert scale is not None
    values = _taken(codes.values, list(cut.ranges), axis)
    return replace(codes, values=values, scale=scale, zero=shared(codes.zero), low=shared(codes.low))


def _taken(tensor: torch.Tensor, ranges: list[range], axis: int) -> torch.Tensor:
    data = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    parts = [data.narrow(axis, each.start, len(each)) for each in ranges]
    return torch.cat(parts, axis).view(tensor.dtype)
