"""Quantized weights of a model without numbers yet: which layout a scheme becomes, and what the loader fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows, num_bytes
from pagebus.kernels.quantized.values import E2M1
from pagebus.kernels.quantized.words import num_words

VALUES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.int8}
"""Numbers with a zero point are stored as signed ones."""


class _Empty(Protocol):
    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedPart:
    """What the tensors of one ``module`` of the checkpoint fill: ``weight`` [n, K], or [E, n, K] if the checkpoint has
    all experts as one; ``by_columns``: it has them as [E, K, n], which is not read."""

    module: str
    scheme: Scheme
    weight: Layout
    by_columns: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return num_bytes(self.weight)


def empty_layout(
    scheme: Scheme, rows: Sequence[int], columns: int, device: torch.device, *,
    experts: int | None = None, by_rows: bool = False,
) -> Layout:  # fmt: skip
    """A layout [N, K] without numbers for parts of these ``rows``, or [E, N, K]. ``by_rows``: no scale is shared
    between rows, so that they can be reordered."""
    lead, count = () if experts is None else (experts,), sum(rows)
    height, width = scheme.block
    width = min(width, columns) or columns

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((*lead, *shape), dtype=dtype, device=device)

    order = torch.full((*lead, columns), -1, dtype=torch.int32, device=device) if scheme.ordered else None
    groups = -(-columns // width)
    if scheme.bits <= 4:
        return _words(scheme, empty, count, columns, width, order)
    values = empty(count, columns, dtype=VALUES[scheme.numbers])
    rounded = scheme.activations != "none"
    if groups == 1 and height <= 1 and not scheme.zeros and not scheme.lows:
        return W8Rows(values, empty(count), rounded=rounded)
    starts = accumulate(rows[:-1])
    height = 1 if by_rows or height <= 1 or any(start % height for start in starts) else height
    shape = -(-count // height), groups
    zero, low = (empty(*shape) if there else None for there in (scheme.zeros, scheme.lows))
    return W8Blocks(values, empty(*shape), (height, width), zero, low, order, rounded)


def _words(scheme: Scheme, empty: _Empty, rows: int, columns: int, group: int, order: torch.Tensor | None) -> W4Words:
    groups, words = -(-columns // group), empty(rows, num_words(columns), dtype=torch.int32)
    dtype = {"float": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}[scheme.scales]
    table = None
    if scheme.numbers == "e2m1":
        table = torch.tensor(E2M1, device=words.device)
    elif scheme.numbers in ("nf4", "fp4"):
        table = torch.zeros(16, device=words.device)
    return W4Words(
        words,
        empty(groups, rows, dtype=dtype),
        columns,
        group,
        zero=empty(groups, rows, dtype=torch.uint8) if scheme.zeros else None,
        low=empty(groups, rows) if scheme.lows else None,
        whole=empty(rows) if scheme.scales == "e4m3" else None,
        table=table,
        order=order,
        e2m1=scheme.numbers == "e2m1",
    )
