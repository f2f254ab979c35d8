"""Adapters in host memory as blocks hold them, so that placing one is a copy for each block.

Each matrix is copied once, to where blocks hold it, by numpy: torch would divide each of many small copies over
threads, which wait for each other where processors are busy. Only a product on two chunks is copied twice. Most
adapters need none of these copies, see :mod:`pagebus.actors.executor.adapters.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagebus.actors.executor.adapters.experts import HostExperts
from pagebus.actors.executor.adapters.pinned import PinnedMemory
from pagebus.actors.executor.adapters.reading import HostAdapter, HostModule
from pagebus.actors.model.lora.projections import Projection
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, UNIT, lay_out_experts

Bits = npt.NDArray[np.signedinteger[Any]]
"""Numbers of 16 or 32 bits, as they lie in memory."""

CHUNK_BYTES = 16 << 20
"""Of host memory that is taken, and may be pinned, at a time. Calls to the driver wait meanwhile. What was evicted is
used again for whatever adapter comes next, whose chunks are as large."""


class Image(NamedTuple):
    """An adapter as its blocks hold it one behind the other, in host memory from which devices copy: ``chunks`` of
    whole pages, and the last; of each product, or of each expert's, where it begins, and what
    :attr:`PagedTable.places` says if that is in the first page; and the scales of all modules."""

    chunks: tuple[torch.Tensor, ...]
    begins: torch.Tensor
    fields: torch.Tensor
    scales: torch.Tensor

    @property
    def length(self) -> int:
        """Elements."""
        return sum(map(len, self.chunks))


class Product(NamedTuple):
    """``widths``: the outputs of each module, of gate and up as one tensor half of them; ``order``: as of the linear,
    in host memory."""

    projection: Projection
    widths: tuple[int, ...]
    order: torch.Tensor | None = None

    def room(self, largest: int) -> int:
        """Elements at the largest rank, of an expert where there are such, as :func:`lay_out` gives them."""
        inputs = -(-self.projection.inputs // 256) * 256
        b = -(-sum(self.widths) * largest // UNIT) * UNIT
        return len(self.projection.modules) * largest * inputs + b


class Entries(NamedTuple):
    """Of one product: the length of its values and what fills them, as bits; and of each of its entries what
    :class:`Image` has."""

    length: int
    fill: Callable[[Bits], None]
    begins: torch.Tensor
    fields: torch.Tensor
    scales: torch.Tensor


class ImageMaker:
    """Makes images of adapters of these ``products`` in pages of ``page_size`` elements, in ``pinned`` memory where
    devices copy from it."""

    def __init__(
        self, products: Sequence[Product], dtype: torch.dtype, page_size: int, pinned: PinnedMemory | None = None
    ) -> None:
        self.products, self._dtype, self._pinned = products, dtype, pinned
        self._chunk = max(1, CHUNK_BYTES // (page_size * dtype.itemsize)) * page_size

    def image(self, adapter: HostAdapter) -> Image:
        """The adapter as its blocks hold it. Any thread."""
        found, begin = [], 0
        for product in self.products:
            entries = self.entries(adapter, product)
            found.append(entries._replace(begins=entries.begins + begin))
            begin += entries.length
        chunks, begin = self.empty(begin), 0
        bits = [bits_of(each) for each in chunks]
        for entries in found:
            _fill_at(begin, entries, bits)
            begin += entries.length
        told = [entries[2:] for entries in found or [_nothing(0, 0)]]
        return Image(tuple(chunks), *(torch.cat(each) for each in zip(*told, strict=True)))

    def empty(self, length: int) -> list[torch.Tensor]:
        """Chunks for so many elements."""
        sizes = [min(self._chunk, length - begin) for begin in range(0, length, self._chunk)]
        if self._pinned is None:
            return [torch.empty(size, dtype=self._dtype) for size in sizes]
        return [self._pinned.take(size * self._dtype.itemsize).view(self._dtype) for size in sizes]

    @torch.inference_mode()
    def entries(self, adapter: HostAdapter, product: Product) -> Entries:
        """What one product has of it."""
        return (self._of_experts if product.projection.experts else self._of_modules)(adapter, product)

    def _of_modules(self, adapter: HostAdapter, product: Product) -> Entries:
        projection = product.projection
        found = [each if isinstance(each, HostModule) else None for each in map(adapter.get, projection.modules)]
        ranks = [len(each.a) for each in found if each is not None]
        if not ranks:
            return _nothing(1, len(product.widths))
        constant = max(ranks) + 1 if any(each is not None and each.bias is not None for each in found) else 0
        rank = _padded(max(*ranks, constant))
        rows, first_b = len(found) * rank, len(found) * rank * -(-projection.inputs // 256) * 256
        length = first_b + -(-sum(projection.widths) * rank // UNIT) * UNIT
        scales = [0.0 if each is None else each.scale for each in found]
        if len(product.widths) > len(found):  # gate and up of one module: they share A
            scales *= len(product.widths)
        fill = partial(_fill, found=found, product=product, rank=rank, constant=constant, dtype=self._dtype)
        told = [rank, rows, 0 if rows == rank else rank, first_b]
        return _entries(1, length, fill, told, torch.tensor(scales).view(1, -1), constant)

    def _of_experts(self, adapter: HostAdapter, product: Product) -> Entries:
        """Of all experts at once: there may be thousands, and steps go on beside this."""
        projection, modules = product.projection, len(product.widths)
        both = adapter.get(projection.fused)
        found = [adapter.get(name) for name in projection.modules] if both is None else [both]
        given = [(index, each) for index, each in enumerate(found) if isinstance(each, HostExperts)]
        if not given:
            return _nothing(projection.experts, modules)
        rank = _padded(max(each.a.shape[1] for _, each in given))
        a = torch.zeros(projection.experts, len(found) * rank, projection.inputs, dtype=self._dtype)
        b = torch.zeros(projection.experts, sum(product.widths), rank, dtype=self._dtype)
        scales, outputs = torch.zeros(projection.experts, len(found)), b.shape[1] // len(found)
        for index, each in given:
            size = each.a.shape[1]
            a[:, index * rank : index * rank + size] = each.a
            b[:, index * outputs : (index + 1) * outputs, :size] = each.b
            scales[:, index] = each.scales
        flat, told = lay_out_experts(a, b)
        fill = partial(np.copyto, src=bits_of(flat.flatten()))
        return _entries(len(flat), flat.shape[1], fill, told, scales.expand(-1, modules))


def _entries(
    count: int, length: int, fill: Callable[[Bits], None], told: list[int], scales: torch.Tensor, constant: int = 0
) -> Entries:
    """So many entries of this ``length``, alike but for their scales [n, J]."""
    rank, rows, step, b = told
    fields = torch.tensor([[rank, rows, step, 0, b, constant]], dtype=torch.int32).expand(count, -1)
    return Entries(count * length, fill, torch.arange(count) * length, fields, scales.flatten())


def _fill_at(begin: int, entries: Entries, chunks: Sequence[Bits]) -> None:
    """Fill the entries of a product from this element of all ``chunks`` on, which are as long as the first, or shorter
    behind all others."""
    if not entries.length:
        return
    size, end = len(chunks[0]), begin + entries.length
    first, last = begin // size, (end - 1) // size
    if first == last:
        entries.fill(chunks[first][begin - first * size : end - first * size])
        return
    values = np.empty(entries.length, chunks[0].dtype)
    entries.fill(values)
    for index in range(first, last + 1):
        start, stop = max(begin, index * size), min(end, (index + 1) * size)
        chunks[index][start - index * size : stop - index * size] = values[start - begin : stop - begin]


def _nothing(count: int, modules: int) -> Entries:
    fields = torch.zeros(count, PLACE_FIELDS, dtype=torch.int32)
    return Entries(0, _keep, torch.zeros(count, dtype=torch.int64), fields, torch.zeros(count * modules))


def _keep(_: Bits) -> None:
    """There is nothing to fill."""


def bits_of(values: torch.Tensor) -> Bits:
    """The same memory as whole numbers, for numpy does not know all formats."""
    bits: Bits = values.view(torch.int16 if values.itemsize == 2 else torch.int32).numpy()
    return bits


def _fill(
    flat: Bits, *, found: Sequence[HostModule | None], product: Product, rank: int, constant: int, dtype: torch.dtype
) -> None:
    """All modules side by side, as :func:`lay_out` has them, at the ``rank`` of the largest."""
    inputs, widths = product.projection.inputs, product.projection.widths
    pieces, whole = -(-inputs // 256), inputs // 256
    end_a = len(found) * rank * pieces * 256
    a = flat[:end_a].reshape(pieces, len(found), rank, 256)
    flat[end_a + sum(widths) * rank :] = 0
    b = flat[end_a : end_a + sum(widths) * rank].reshape(-1, rank)
    ordered = b if product.order is None else np.empty_like(b)
    first = 0
    for index, (module, width) in enumerate(zip(found, widths, strict=True)):
        size, rows = 0 if module is None else len(module.a), ordered[first : first + width]
        if module is not None:
            values = bits_of(module.a.to(dtype).contiguous())
            a[:whole, index, :size] = values[:, : whole * 256].reshape(size, whole, 256).transpose(1, 0, 2)
            a[whole:, index, :size, : inputs % 256] = values[:, whole * 256 :]
            rows[:, :size] = bits_of(module.b.to(dtype).contiguous())
        a[:, index, size:] = 0
        a[whole:, index, :, inputs % 256 :] = 0
        rows[:, size:] = 0
        if module is not None and module.bias is not None:
            rows[:, constant - 1] = bits_of(module.bias.to(dtype).contiguous())
        first += width
    if product.order is not None:
        np.take(ordered, product.order.numpy(), axis=0, out=b)


def _padded(rank: int) -> int:
    multiple = int(RANKS)
    return -(-rank // multiple) * multiple
