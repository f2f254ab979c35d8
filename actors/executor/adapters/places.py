"""Adapters in blocks of the cache, and the tables by which the products of a network find them there.

Which blocks an adapter has is for the scheduler to say; there is no memory for adapters beside the cache. The tables
have a row for each adapter that is placed. They are small: of each product the pages that it begins and goes on in, and
what :attr:`PagedTable.places` has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import torch

from pagebus.actors.executor.adapters.images import Image, ImageMaker, Product
from pagebus.actors.executor.adapters.layouts import Layouts
from pagebus.actors.executor.adapters.pages import BlockPages
from pagebus.actors.executor.adapters.pinned import PinnedMemory
from pagebus.actors.executor.adapters.reading import AdapterNumbers
from pagebus.actors.executor.layers.adapted.products import Adapted, AdaptedExperts, AdaptedHead
from pagebus.actors.executor.layers.adapted.slots import copy_at_once
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.memory.block_loads import BlockLoad
from pagebus.actors.executor.memory.host_memory import lock_pages
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.lora.projections import BIAS, EMBEDDING, HEAD, Projection, projections
from pagebus.bus.messages import Int32Array
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
    """``count`` rows of the tables for adapters of up to ``max_rank`` in a network, whose products look there once
    :meth:`use` has said where the cache is. It has blocks of ``block_bytes``. ``targets``: which modules may be
    adapted, see :func:`projections`."""

    def __init__(
        self, network: Decoder, count: int, max_rank: int, block_bytes: int, targets: Collection[str] = ()
    ) -> None:
        self.count, self._largest = count, _padded(max_rank + (BIAS in targets))  # a bias takes a rank
        self._network, self._constants = network, BIAS in targets
        device = network.parameters.device
        self._pages = BlockPages(block_bytes, network.parameters.dtype)
        self._page_size = self._pages.size
        self._linears = {next(iter(each.modules)): each for layer in network.layers for each in layer.products}
        self._products = [_product(each, self._linears) for each in projections(network.config, targets)]
        pinned = PinnedMemory(partial(lock_pages, device=device)) if device.type == "cuda" else None
        images = ImageMaker(self._products, network.parameters.dtype, self._page_size, pinned)
        self._layouts = Layouts(images, network.config)
        self.adapt_heads = any(each.projection.name == HEAD for each in self._products)
        """Whether adapters may change the head."""
        # An entry may begin anywhere in a page.
        largest_room = max((each.room(self._largest) for each in self._products), default=0)
        self._most_pages = -(-largest_room // self._page_size) + 1
        self._sizes = [count * each.projection.copies for each in self._products]
        self._widths = [size * len(each.widths) for size, each in zip(self._sizes, self._products, strict=True)]
        self._rows, self._scale_rows = (
            _rows([size // count for size in each], count) for each in (self._sizes, self._widths)
        )
        self._table_pages = torch.zeros(sum(self._sizes), self._most_pages, dtype=torch.int64, device=device)
        self._table_fields = torch.zeros(sum(self._sizes), PLACE_FIELDS, dtype=torch.int32, device=device)
        self._table_scales = torch.zeros(sum(self._widths), device=device)
        factors = (network.embedding.scale if each.projection.name == EMBEDDING else 1.0 for each in self._products)
        self._factors = torch.tensor([*factors]).repeat_interleave(torch.tensor(self._widths) // count)
        """By what all that adapters add is multiplied."""

    def use(self, cache: torch.Tensor) -> None:
        """Have products read adapters from this cache [num_blocks, ...]."""
        memory = self._pages.within(cache)
        pages, fields = self._table_pages.split(self._sizes), self._table_fields.split(self._sizes)
        tables = {
            product.projection.name: PagedTable(
                memory, page, field, scale.view(len(page), -1), product.widths, self._largest, self._page_size,
                self._constants,
            )
            for product, page, field, scale in zip(
                self._products, pages, fields, self._table_scales.split(self._widths), strict=True
            )
        }  # fmt: skip
        _connect(self._network, self._linears, tables)

    def image(self, adapter: AdapterNumbers) -> Image:
        """The adapter as :meth:`place` takes it. Any thread."""
        return self._layouts.image(adapter)

    def num_blocks(self, image: Image) -> int:
        """Blocks that it takes."""
        return self._pages.count(image.length)

    @torch.inference_mode()
    def place(self, row: int, image: Image, blocks: Int32Array) -> list[BlockLoad]:
        """Enter an adapter that comes to ``blocks`` into a row of the tables, whatever was there, in the order of
        launches; the host does not wait. Returns what has to be copied."""
        size = self._page_size
        begins = self._pages.begins(torch.from_numpy(blocks.astype("int64")))
        if len(begins):
            first = image.begins // size
            pages = begins[(first[:, None] + torch.arange(self._most_pages)).clamp_(max=len(begins) - 1)]
        else:
            pages = torch.zeros(len(image.begins), self._most_pages, dtype=torch.int64)
        fields = image.fields.clone()
        fields[:, 3:5] += (image.begins % size).to(torch.int32)[:, None]
        _enter(self._table_pages, self._rows.of(row), pages)
        _enter(self._table_fields, self._rows.of(row), fields)
        _enter(self._table_scales, self._scale_rows.of(row), image.scales * self._factors)
        bytes_each = self._pages.dtype.itemsize
        parts = [part for chunk in image.chunks for part in chunk.view(torch.uint8).split(size * bytes_each)]
        targets = (begins * bytes_each).tolist()
        return [BlockLoad(*each) for each in zip(blocks.tolist(), targets, parts, strict=False)]


def _enter(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Set rows of a table on a device."""
    if not table.is_cuda:
        table[rows] = values
        return
    there, entered = torch.empty_like(rows, device=table.device), torch.empty_like(values, device=table.device)
    copy_at_once(there, rows)
    copy_at_once(entered, values)
    table.index_copy_(0, there, entered)


def _product(projection: Projection, linears: Mapping[str, Linear]) -> Product:
    widths, linear = projection.widths, linears.get(projection.name)
    if linear is None:
        return Product(projection, widths)
    if linear.form == "gated" and len(widths) == 1:
        widths = (widths[0] // 2,) * 2
    order = None if linear.order is None or linear.order.is_meta else linear.order.cpu()
    return Product(projection, widths, order)


def _connect(network: Decoder, linears: Mapping[str, Linear], tables: Mapping[str, PagedTable]) -> None:
    """Have the parts of a network look into their tables."""
    current = network.adapters
    for name, linear in linears.items():
        if name in tables:
            linear.adapt(Adapted(tables[name], current))
    if EMBEDDING in tables:
        network.embedding.adapt(Adapted(tables[EMBEDDING], current))
    if network.head is not None and HEAD in tables:
        network.head.adapt(AdaptedHead(tables[HEAD], current))
    for experts in (layer.experts for layer in network.layers):
        if experts is not None and (gate_up := tables.get(f"{experts.prefix}.gate_proj")) is not None:
            both = ExpertTables(gate_up, tables[f"{experts.prefix}.down_proj"])
            experts.adapt(AdaptedExperts(both, current))


def _rows(sizes: list[int], count: int) -> _Rows:
    """Of products that have so many entries in each of ``count`` places: all places of a product are together."""
    firsts, steps, first = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)], 0
    for size in sizes:
        firsts.append(torch.arange(first, first + size))
        steps.append(torch.full((size,), size))
        first += count * size
    return _Rows(torch.cat(firsts), torch.cat(steps))


def _padded(rank: int) -> int:
    multiple = int(RANKS)
    return -(-rank // multiple) * multiple
