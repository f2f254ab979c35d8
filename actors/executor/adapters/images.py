"""Adapters in host memory as blocks hold them, so that placing one is a copy for each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagebus.actors.executor.adapters.experts import HostExperts
from pagebus.actors.executor.adapters.reading import HostAdapter, HostModule
from pagebus.actors.model.lora.projections import Projection
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, UNIT, Matrices, lay_out, lay_out_experts


class Image(NamedTuple):
    """An adapter as its blocks hold it one behind the other, in host memory from which devices copy: ``values``; of
    each product, or of each expert's, where it begins, and what :attr:`PagedTable.places` says if that is in the first
    page; and the scales of all modules."""

    values: torch.Tensor
    begins: torch.Tensor
    fields: torch.Tensor
    scales: torch.Tensor


class Product(NamedTuple):
    """``widths``: the outputs of each module, of gate and up as one tensor half of them; ``order``: as of the linear,
    in host memory; ``scale``: by what more all that adapters add is multiplied."""

    projection: Projection
    widths: tuple[int, ...]
    order: torch.Tensor | None = None
    scale: float = 1.0

    def room(self, largest: int) -> int:
        """Elements at the largest rank, of an expert where there are such, as :func:`lay_out` gives them."""
        inputs = -(-self.projection.inputs // 256) * 256
        b = -(-sum(self.widths) * largest // UNIT) * UNIT
        return len(self.projection.modules) * largest * inputs + b


class _Entries(NamedTuple):
    """Of one product: flat values, and of each of its entries what :class:`Image` has."""

    values: torch.Tensor
    begins: torch.Tensor
    fields: torch.Tensor
    scales: torch.Tensor


class ImageMaker:
    """Makes images of adapters of these ``products``, in memory that is ``pinned`` where devices copy from it."""

    def __init__(self, products: Sequence[Product], dtype: torch.dtype, *, pinned: bool) -> None:
        self._products, self._dtype, self._pinned = products, dtype, pinned

    @torch.inference_mode()
    def image(self, adapter: HostAdapter) -> Image:
        """The adapter as its blocks hold it. Any thread."""
        found, begin = [], 0
        for product in self._products:
            make = self._of_experts if product.projection.experts else self._of_modules
            entries = make(adapter, product)
            found.append(entries._replace(begins=entries.begins + begin))
            begin += len(entries.values)
        if not found:
            found = [_nothing(0, 0, self._dtype)]
        values, *told = (torch.cat(each) for each in zip(*found, strict=True))
        return Image(values.pin_memory() if self._pinned else values, *told)

    def _of_modules(self, adapter: HostAdapter, product: Product) -> _Entries:
        matrices = _matrices(adapter, product, self._dtype)
        if matrices is None:
            return _nothing(1, len(product.widths), self._dtype)
        flat, told = lay_out(matrices)
        return _entries(flat.view(1, -1), told, torch.tensor(matrices.scales).view(1, -1), matrices.constant)

    def _of_experts(self, adapter: HostAdapter, product: Product) -> _Entries:
        """Of all experts at once: there may be thousands, and steps go on beside this."""
        projection, modules = product.projection, len(product.widths)
        both = adapter.get(projection.fused)
        found = [adapter.get(name) for name in projection.modules] if both is None else [both]
        given = [(index, each) for index, each in enumerate(found) if isinstance(each, HostExperts)]
        if not given:
            return _nothing(projection.experts, modules, self._dtype)
        rank = _padded(max(each.a.shape[1] for _, each in given))
        a = torch.zeros(projection.experts, len(found) * rank, projection.inputs, dtype=self._dtype)
        b = torch.zeros(projection.experts, sum(product.widths), rank, dtype=self._dtype)
        scales, outputs = torch.zeros(projection.experts, len(found)), b.shape[1] // len(found)
        for index, each in given:
            size = each.a.shape[1]
            a[:, index * rank : index * rank + size] = each.a
            b[:, index * outputs : (index + 1) * outputs, :size] = each.b
            scales[:, index] = each.scales
        return _entries(*lay_out_experts(a, b), scales.expand(-1, modules))


def _entries(flat: torch.Tensor, told: list[int], scales: torch.Tensor, constant: int = 0) -> _Entries:
    """flat [n, length]: as many entries, alike but for their scales [n, J]."""
    rank, rows, step, b = told
    fields = torch.tensor([[rank, rows, step, 0, b, constant]], dtype=torch.int32).expand(len(flat), -1)
    return _Entries(flat.flatten(), torch.arange(len(flat)) * flat.shape[1], fields, scales.flatten())


def _nothing(count: int, modules: int, dtype: torch.dtype) -> _Entries:
    fields = torch.zeros(count, PLACE_FIELDS, dtype=torch.int32)
    begins = torch.zeros(count, dtype=torch.int64)
    return _Entries(torch.zeros(0, dtype=dtype), begins, fields, torch.zeros(count * modules))


def _matrices(adapter: HostAdapter, product: Product, dtype: torch.dtype) -> Matrices | None:
    """Of all modules side by side, at the largest rank of them; None: none is adapted."""
    projection = product.projection
    found = [each if isinstance(each, HostModule) else None for each in map(adapter.get, projection.modules)]
    ranks = [len(each.a) for each in found if each is not None]
    if not ranks:
        return None
    biased = any(each.bias is not None for each in found if each is not None)
    constant = max(ranks) + 1 if biased else 0
    rank = _padded(max(*ranks, constant))
    a = torch.zeros(len(found) * rank, projection.inputs, dtype=dtype)
    b, first = torch.zeros(sum(projection.widths), rank, dtype=dtype), 0
    for index, (module, width) in enumerate(zip(found, projection.widths, strict=True)):
        if module is not None:
            a[index * rank :][: len(module.a)] = module.a
            b[first : first + width, : len(module.a)] = module.b
            if module.bias is not None:
                b[first : first + width, constant - 1] = module.bias
        first += width
    scales = [0.0 if each is None else each.scale * product.scale for each in found]
    if len(product.widths) > len(found):  # gate and up of one module: they share A
        scales *= len(product.widths)
    return Matrices(a, b if product.order is None else b.index_select(0, product.order), scales, constant)


def _padded(rank: int) -> int:
    multiple = int(RANKS)
    return -(-rank // multiple) * multiple
