"""Places for adapters on the device: stretches of one buffer, where the products of a network look for theirs.

A place has room for every module that may be adapted at the largest rank. It is allocated before the cache is sized,
which therefore gets what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from pagebus.actors.executor.adapters.images import Image, ImageMaker, Product
from pagebus.actors.executor.adapters.reading import HostAdapter
from pagebus.actors.executor.layers.adapted.products import Adapted, AdaptedExperts, AdaptedHead
from pagebus.actors.executor.layers.adapted.slots import copy_at_once
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.lora.projections import BIAS, EMBEDDING, HEAD, Projection, projections
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, PagedTable
from pagebus.kernels.moe.adapted.experts import ExpertTables


class _Rows(NamedTuple):
    """Where a place's entries are among those of all places: ``first`` [n] in the first place, and ``step`` [n] from a
    place to the next."""

    first: torch.Tensor
    step: torch.Tensor

    def of(self, place: int) -> torch.Tensor:
        return self.first + place * self.step


class Places:
    """``count`` places for adapters of up to ``max_rank`` in a network, whose products look there from now on.
    ``targets``: for which modules there is room, see :func:`projections`."""

    def __init__(self, network: Decoder, count: int, max_rank: int, targets: Collection[str] = ()) -> None:
        self.count, largest = count, _padded(max_rank + (BIAS in targets))  # a bias takes a rank
        device = network.parameters.device
        linears = {next(iter(each.modules)): each for layer in network.layers for each in layer.products}
        products = [_product(each, network, linears) for each in projections(network.config, targets)]
        self._images = ImageMaker(products, network.parameters.dtype, pinned=device.type == "cuda")
        size = sum(each.room(largest) for each in products)
        self._memory = torch.zeros(count, size, dtype=network.parameters.dtype, device=device)
        # What kernels read of each product, on the device and as it is on the host: small, and copied as a whole.
        sizes = [each.projection.copies for each in products]
        widths = [each.projection.copies * len(each.widths) for each in products]
        self._rows, self._scale_rows = _rows(sizes, count), _rows(widths, count)
        self._pages = torch.zeros(count * sum(sizes), 1, dtype=torch.int64)
        self._fields = torch.zeros(count * sum(sizes), PLACE_FIELDS, dtype=torch.int32)
        self._scales = torch.zeros(count * sum(widths))
        tables = self._pages, self._fields, self._scales
        self._on_device = tuple(each.to(device, copy=True) for each in tables)
        found = _tables(self._on_device, self._memory, products, count, largest, constants=BIAS in targets)
        by_name = {product.projection.name: table for product, table in zip(products, found, strict=True)}
        self.adapt_heads = HEAD in by_name
        """Whether adapters may change the head."""
        _connect(network, linears, by_name)

    @property
    def num_bytes(self) -> int:
        """Device memory that they take."""
        return self._memory.nbytes

    def image(self, adapter: HostAdapter) -> Image:
        """The adapter as :meth:`fill` takes it. Any thread."""
        return self._images.image(adapter)

    @torch.inference_mode()
    def fill(self, place: int, image: Image) -> None:
        """Put an adapter into a place, whatever was there, in the order of launches; the host does not wait."""
        copy_at_once(self._memory[place, : len(image.values)], image.values)
        rows = self._rows.of(place)
        self._pages[rows, 0] = image.begins + place * self._memory.shape[1]
        self._fields[rows] = image.fields
        self._scales[self._scale_rows.of(place)] = image.scales
        for target, source in zip(self._on_device, (self._pages, self._fields, self._scales), strict=True):
            copy_at_once(target, source)


def _product(projection: Projection, network: Decoder, linears: Mapping[str, Linear]) -> Product:
    widths, linear = projection.widths, linears.get(projection.name)
    if linear is None:
        scale = network.embedding.scale if projection.name == EMBEDDING else 1.0
        return Product(projection, widths, scale=scale)
    if linear.form == "gated" and len(widths) == 1:
        widths = (widths[0] // 2,) * 2
    order = None if linear.order is None or linear.order.is_meta else linear.order.cpu()
    return Product(projection, widths, order)


def _connect(network: Decoder, linears: Mapping[str, Linear], tables: Mapping[str, PagedTable]) -> None:
    """Have the parts of a network look into their tables."""
    current = network.adapters
    for name, linear in linears.items():
        if name in tables:
            linear.adapted = Adapted(tables[name], current)
    if EMBEDDING in tables:
        network.embedding.adapted = Adapted(tables[EMBEDDING], current)
    if network.head is not None and HEAD in tables:
        network.head.adapted = AdaptedHead(tables[HEAD], current)
    for experts in (layer.experts for layer in network.layers):
        if experts is not None and (gate_up := tables.get(f"{experts.prefix}.gate_proj")) is not None:
            both = ExpertTables(gate_up, tables[f"{experts.prefix}.down_proj"])
            experts.adapted = AdaptedExperts(both, current)


def _rows(sizes: list[int], count: int) -> _Rows:
    """Of products that have so many entries in each place: all places of a product are together."""
    firsts, steps, first = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)], 0
    for size in sizes:
        firsts.append(torch.arange(first, first + size))
        steps.append(torch.full((size,), size))
        first += count * size
    return _Rows(torch.cat(firsts), torch.cat(steps))


def _tables(
    on_device: tuple[torch.Tensor, ...], memory: torch.Tensor, products: list[Product], count: int, largest: int, *,
    constants: bool,
) -> list[PagedTable]:  # fmt: skip
    """Of each product its part of the tables that kernels read."""
    pages, fields, scales = on_device
    sizes = [count * each.projection.copies for each in products]
    widths = [size * len(each.widths) for size, each in zip(sizes, products, strict=True)]
    parts = zip(products, pages.split(sizes), fields.split(sizes), scales.split(widths), strict=True)
    return [
        PagedTable(memory, page, field, scale.view(len(page), -1), product.widths, largest, memory.shape[1], constants)
        for product, page, field, scale in parts
    ]


def _padded(rank: int) -> int:
    multiple = int(RANKS)
    return -(-rank // multiple) * multiple
