"""Places for adapters on the device: stretches of one buffer, where the products of a network look for theirs.

A place has room for every module at the largest rank. It is allocated before the cache is sized, which therefore gets
what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.actors.executor.adapters.reading import HostAdapter
from pagebus.actors.executor.layers.adapted.products import Adapted
from pagebus.actors.executor.layers.adapted.slots import copy_at_once
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.lora.projections import Projection, projections
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, UNIT, Matrices, PagedTable, lay_out


class Image(NamedTuple):
    """An adapter as a place holds it, in host memory from which devices copy: ``values`` [n]; and of each product
    where it begins, what :attr:`PagedTable.places` says, and the scales."""

    values: torch.Tensor
    begins: list[int]
    fields: list[list[int]]
    scales: list[list[float]]


class _Product(NamedTuple):
    """``widths``: the outputs of each module, of gate and up as one tensor half of them; ``order``: as of the linear,
    in host memory."""

    projection: Projection
    widths: tuple[int, ...]
    order: torch.Tensor | None


class Places:
    """``count`` places for adapters of up to ``max_rank`` in a network, whose products look there from now on."""

    def __init__(self, network: Decoder, count: int, max_rank: int) -> None:
        self.count, largest = count, _padded(max_rank)
        parameters = network.parameters
        self._dtype, device = parameters.dtype, parameters.device
        linears = {next(iter(each.modules)): each for layer in network.layers for each in layer.products}
        found = [(each, linears[each.name]) for each in projections(network.config)]
        self._products = [_product(projection, linear) for projection, linear in found]
        size = sum(_room(each, largest) for each in self._products)
        self._memory = torch.zeros(count, size, dtype=self._dtype, device=device)
        # What kernels read of each product, on the device and as it is on the host: small, and copied as a whole.
        self._pages = torch.zeros(len(found), count, 1, dtype=torch.int64)
        self._fields = torch.zeros(len(found), count, PLACE_FIELDS, dtype=torch.int32)
        self._scales = [torch.zeros(count, len(each.widths)) for each in self._products]
        self._device_pages, self._device_fields = self._pages.to(device, copy=True), self._fields.to(device, copy=True)
        self._device_scales = torch.cat([each.flatten() for each in self._scales]).to(device, copy=True)
        sizes = [each.numel() for each in self._scales]
        every = zip(found, self._products, self._device_scales.split(sizes), strict=True)
        for index, ((_, linear), product, scales) in enumerate(every):
            table = PagedTable(
                self._memory, self._device_pages[index], self._device_fields[index], scales.view(count, -1),
                product.widths, largest, size,
            )  # fmt: skip
            linear.adapted = Adapted(table, network.adapters)

    @property
    def num_bytes(self) -> int:
        """Device memory that they take."""
        return self._memory.nbytes

    @torch.inference_mode()
    def image(self, adapter: HostAdapter) -> Image:
        """The adapter as :meth:`fill` takes it. Any thread."""
        flats, begins, fields, scales, begin = [], [], [], [], 0
        for product in self._products:
            begins.append(begin)
            matrices = _matrices(adapter, product, self._dtype)
            if matrices is None:
                fields.append([0] * PLACE_FIELDS)
                scales.append([0.0] * len(product.widths))
                continue
            flat, (rank, rows, step, b) = lay_out(matrices)
            flats.append(flat)
            fields.append([rank, rows, step, 0, b])
            scales.append(list(matrices.scales))
            begin += len(flat)
        values = torch.cat(flats) if flats else torch.zeros(0, dtype=self._dtype)
        return Image(values.pin_memory() if self._memory.is_cuda else values, begins, fields, scales)

    @torch.inference_mode()
    def fill(self, place: int, image: Image) -> None:
        """Put an adapter into a place, whatever was there, in the order of launches; the host does not wait."""
        copy_at_once(self._memory[place, : len(image.values)], image.values)
        self._pages[:, place, 0] = torch.tensor(image.begins) + place * self._memory.shape[1]
        self._fields[:, place] = torch.tensor(image.fields, dtype=torch.int32)
        for mine, given in zip(self._scales, image.scales, strict=True):
            mine[place] = torch.tensor(given)
        scales = torch.cat([each.flatten() for each in self._scales])
        tables = (self._device_pages, self._pages), (self._device_fields, self._fields), (self._device_scales, scales)
        for target, source in tables:
            copy_at_once(target, source)


def _product(projection: Projection, linear: Linear) -> _Product:
    widths = projection.widths
    if linear.form == "gated" and len(widths) == 1:
        widths = (widths[0] // 2,) * 2
    order = None if linear.order is None or linear.order.is_meta else linear.order.cpu()
    return _Product(projection, widths, order)


def _matrices(adapter: HostAdapter, product: _Product, dtype: torch.dtype) -> Matrices | None:
    """Of all modules side by side, at the largest rank of them; None: none is adapted."""
    projection = product.projection
    found = [adapter.get(name) for name in projection.modules]
    ranks = [len(each.a) for each in found if each is not None]
    if not ranks:
        return None
    rank = _padded(max(ranks))
    a = torch.zeros(len(found) * rank, projection.inputs, dtype=dtype)
    b, first = torch.zeros(sum(projection.widths), rank, dtype=dtype), 0
    for index, (module, width) in enumerate(zip(found, projection.widths, strict=True)):
        if module is not None:
            a[index * rank :][: len(module.a)] = module.a
            b[first : first + width, : len(module.a)] = module.b
        first += width
    scales = [0.0 if each is None else each.scale for each in found]
    if len(product.widths) > len(found):  # gate and up of one module: they share A
        scales *= len(product.widths)
    return Matrices(a, b if product.order is None else b.index_select(0, product.order), scales)


def _room(product: _Product, largest: int) -> int:
    """Elements of a product at the largest rank, as `lay_out` gives them."""
    inputs = -(-product.projection.inputs // 256) * 256
    b = sum(product.widths) * largest
    return len(product.projection.modules) * largest * inputs + -(-b // UNIT) * UNIT


def _padded(rank: int) -> int:
    multiple = int(RANKS)
    return -(-rank // multiple) * multiple
