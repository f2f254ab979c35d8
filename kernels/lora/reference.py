"""What adapters add to a product y = x W^T: y += scale (x A^T) B^T (Hu et al., 2021, arXiv 2106.09685), in two steps.

A product may be several modules of a checkpoint side by side, such as q, k and v. Each has a rank, a scale and an A of
its own, and writes its own outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagebus.kernels.lora.segments import Segments


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """One of the two matrices of one product, for L adapters; R is the largest rank, and J the number of modules.

    ``values``: A as [L, J * R, K], module after module; or B as [L, N, R], where the outputs of a module stand side by
    side, ``widths`` [J] of each. Rows, or columns, behind a module's own rank are zeros. ``ranks`` [L, J] int32 (0: the
    module is not adapted) and ``scales`` [L, J] float32 are the same in both.
    """

    values: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    widths: tuple[int, ...]


def shrink(x: torch.Tensor, a: AdapterTable, segments: Segments) -> torch.Tensor:
    """x [T, K] -> s [T, J * R] float32: x A^T times the scale of each module; zeros without an adapter."""
    s = x.new_zeros(len(x), a.values.shape[1], dtype=torch.float32)
    largest = a.values.shape[1] // len(a.widths)
    for tokens, adapter in _parts(segments):
        scale = a.scales[adapter].repeat_interleave(largest)
        s[tokens] = (x[tokens].float() @ a.values[adapter].float().T) * scale
    return s


def expand(s: torch.Tensor, b: AdapterTable, segments: Segments, y: torch.Tensor) -> torch.Tensor:
    """Add s B^T to y [T, N], in place, and return it; s [T, J * R] is what :func:`shrink` gave."""
    largest = b.values.shape[2]
    for tokens, adapter in _parts(segments):
        first = 0
        for module, width in enumerate(b.widths):
            outputs, rows = slice(first, first + width), slice(module * largest, (module + 1) * largest)
            product = s[tokens, rows] @ b.values[adapter, outputs].float().T
            y[tokens, outputs] += product.to(y.dtype)
            first += width
    return y


def _parts(segments: Segments) -> Iterator[tuple[slice, int]]:
    """Each segment's tokens and adapter."""
    number = int(segments.number)
    columns = (segments.first_token, segments.count, segments.adapter)
    for first, count, adapter in zip(*(each[:number].tolist() for each in columns), strict=True):
        yield slice(first, first + count), adapter
