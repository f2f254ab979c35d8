"""Where kernels find the matrices of adapters: in pages, which may lie anywhere in a pool of blocks.

Of each product A is stored in pieces of 256 inputs, as [K / 256][rows][256], so that a program which multiplies a part
of K reads one stretch of memory. B is stored as [N][rank]. Ranks are rounded up to a multiple of 8 and filled with
zeros: then no page ends within 16 bytes of B, nor within a row of a piece of A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagebus.kernels.common.triton import constant, tl, triton

COLUMNS, RANKS = constant(256), constant(8)
"""Inputs of a piece of A; every rank is a multiple of the second."""
UNIT = 2048
"""Each matrix begins at a multiple of this many elements of its adapter, 4 KiB in 16 bits. Pages begin, and end, at
multiples of :data:`COLUMNS`."""
PLACE_FIELDS = 6
MOST_MODULES = 3


@dataclass(frozen=True, slots=True)
class PagedTable:
    """Both matrices of one product, for L adapters of up to P pages; R is the largest rank, and J the number of modules
    whose outputs stand side by side, ``widths`` [J] of each (q, k and v, for example).

    ``memory`` [..] has the model's format. ``pages`` [L, P] int64: the element of it with which each page begins. Pages
    have ``page_size`` elements; with one page for each adapter, a page is as large as the adapter. ``places`` [L, 6]
    int32 is about this product: the rank (0: it is not adapted), the rows of A (of all modules), the rows from a module
    to the next (0: all have the same), where A and B begin, in elements from the adapter's first page on, and the rank
    that is constant, see :class:`Matrices`. ``scales`` [L, J] float32. ``constants``: some adapter may have such one.
    """

    memory: torch.Tensor
    pages: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor
    widths: tuple[int, ...]
    largest: int
    page_size: int
    constants: bool = False

    def __post_init__(self) -> None:
        assert len(self.widths) <= MOST_MODULES
        assert self.largest % 8 == 0
        assert self.page_size % int(COLUMNS) == 0
        assert self.pages.is_contiguous()
        assert self.places.is_contiguous()
        assert self.scales.is_contiguous()

    @property
    def kernel_page(self) -> int:
        """The page size, for kernels: of a single page none has to know it, and each size is a kernel of its own."""
        return 0 if self.pages.shape[1] == 1 else self.page_size

    @property
    def bounds(self) -> tuple[int, int]:
        """The first outputs of the second module and of the third; where there is none, the number of outputs."""
        first, total = self.widths[0], sum(self.widths)
        return first, first + self.widths[1] if len(self.widths) == MOST_MODULES else total


class Matrices(NamedTuple):
    """An adapter of one product: ``a`` [J * r, K], or [r, K] for all modules; ``b`` [N, r]; ``scales`` [J]. If there is
    a ``constant`` rank, from 1 on, its result is 1 for any input and whatever the scale: its column of B is a bias."""

    a: torch.Tensor
    b: torch.Tensor
    scales: Sequence[float]
    constant: int = 0


def lay_out(adapter: Matrices) -> tuple[torch.Tensor, list[int]]:
    """Both matrices as pages hold them; and the rank, the rows of A, those from module to module, where B begins."""
    rank = adapter.b.shape[1]
    assert rank % 8 == 0
    rows, inputs = adapter.a.shape
    pieces = -(-inputs // 256)
    a = adapter.a.new_zeros(rows, pieces * 256)
    a[:, :inputs] = adapter.a
    a = a.view(rows, pieces, 256).transpose(0, 1).flatten()
    flat = a.new_zeros(len(a) + -(-adapter.b.numel() // UNIT) * UNIT)
    flat[: len(a)], flat[len(a) : len(a) + adapter.b.numel()] = a, adapter.b.flatten()
    return flat, [rank, rows, 0 if rows == rank else rank, len(a)]


def lay_out_experts(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """:func:`lay_out` of E experts at once, a [E, rows, K] and b [E, N, r], each behind the one before: [E, length]."""
    (experts, rows, inputs), rank = a.shape, b.shape[2]
    assert rank % 8 == 0
    pieces = -(-inputs // 256)
    first, second = rows * pieces * 256, b[0].numel()
    flat = a.new_zeros(experts, first + -(-second // UNIT) * UNIT)
    padded = torch.nn.functional.pad(a, (0, pieces * 256 - inputs)).view(experts, rows, pieces, 256)
    flat[:, :first].view(experts, pieces, rows, 256).copy_(padded.transpose(1, 2))
    flat[:, first : first + second] = b.flatten(1)
    return flat, [rank, rows, 0 if rows == rank else rank, first]


def read_back(table: PagedTable, adapter: int, inputs: int) -> Matrices | None:
    """What an adapter's pages say; None: it does not adapt the product."""
    rank, rows, _, first_a, first_b, constant = table.places[adapter].tolist()
    if not rank:
        return None
    length = max(first_b + sum(table.widths) * rank, first_a + rows * -(-inputs // 256) * 256)
    begins = table.pages[adapter].tolist()
    begins = begins[: -(-length // table.page_size)]
    flat = torch.cat([table.memory.flatten()[begin : begin + table.page_size] for begin in begins])[:length]
    a = flat[first_a:][: rows * -(-inputs // 256) * 256].view(-1, rows, 256).transpose(0, 1).reshape(rows, -1)
    b = flat[first_b:][: sum(table.widths) * rank].view(-1, rank)
    return Matrices(a[:, :inputs], b, table.scales[adapter].tolist(), constant)


@triton.jit
def elements(pages_ptr, adapter, offset, mask, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """Where the elements at ``offset`` of an adapter's pages are in memory, int64."""
    if PAGES == 1:
        return tl.load(pages_ptr + adapter) + offset
    return tl.load(pages_ptr + adapter * PAGES + offset // PAGE, mask=mask, other=0) + offset % PAGE
