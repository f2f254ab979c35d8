"""Quantizes weights of 16 or 32 bits while they are loaded, each rounded to the nearest."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
import torch.nn.functional as F

from pagebus.actors.executor.loading.formats.reading import FLOATS, Codes, Expected, FormatError, Reader, Tensors
from pagebus.actors.model.quantization.scheme import Scheme

LARGEST = {"e4m3": 448.0, "int8": 127.0}
"""The number that the largest of a row becomes."""
NUMBERS_AT_ONCE = 1 << 22
"""Numbers of a weight that are rounded at once; each takes several float32 numbers meanwhile."""


def _expected(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return {"weight": Expected(FLOATS, ((rows, columns),))}


def _read(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Some rows at a time, so that little more than the weight itself and its codes is in memory."""
    height = max(1, NUMBERS_AT_ONCE // columns)
    parts = tensors["weight"].split(height)
    first = _quantized(parts[0], scheme)
    if len(parts) == 1:
        return first
    zero = None if first.zero is None else _empty(rows, first.zero)
    whole = Codes(_empty(rows, first.values), _empty(rows, first.scale), zero)
    for index, codes in enumerate(chain((first,), (_quantized(part, scheme) for part in parts[1:]))):
        for target, own in zip(_fields(whole), _fields(codes), strict=True):
            target[index * height : index * height + len(own)] = own
    return whole


def _fields(codes: Codes) -> list[torch.Tensor]:
    """The tensors that have a row per row of the weight."""
    return [each for each in (codes.values, codes.scale, codes.zero) if each is not None]


def _empty(rows: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(rows, *like.shape[1:])


def _quantized(part: torch.Tensor, scheme: Scheme) -> Codes:
    """Codes of rows [n, K] in any format of 16 or 32 bits. Raises FormatError."""
    weight = part.float()
    if not bool(weight.isfinite().all()):
        raise FormatError("has weights that are no finite numbers")
    if scheme.numbers == "uint4":
        return _in_groups(weight, scheme.block[1] or weight.shape[1])
    largest = LARGEST[scheme.numbers]
    scale = weight.abs().amax(1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    values = (weight / scale).clamp(-largest, largest)
    return Codes(values.to(torch.float8_e4m3fn) if scheme.numbers == "e4m3" else values.round().to(torch.int8), scale)


def _in_groups(weight: torch.Tensor, group: int) -> Codes:
    """Codes 0 to 15 from the least to the largest of each group; zero is always one of them."""
    rows, columns = weight.shape
    groups = F.pad(weight, (0, -columns % group)).view(rows, -1, group)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scale = (high - low) / 15
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15).to(torch.uint8)
    return Codes(codes.flatten(1)[:, :columns], scale, zero.to(torch.uint8))


READERS = {"online": Reader(_expected, _read)}
