"""Places for adapters on the device: of every product one table of A, and one of B.

A place has room for every module at the largest rank. It is allocated before the cache is sized, which therefore gets
what is left.
"""

from __future__ import annotations

import torch

from pagebus.actors.executor.adapters.reading import HostAdapter
from pagebus.actors.executor.layers.adapted.products import Adapted, AdapterPass
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.lora.projections import Projection, projections
from pagebus.kernels.lora.reference import AdapterTable


class Places:
    """``count`` places for adapters of up to ``max_rank`` in a network, whose products look there from now on."""

    def __init__(self, network: Decoder, count: int, max_rank: int) -> None:
        self.count, self._max_rank = count, max_rank
        self.current: AdapterPass = network.adapters
        self.device = network.parameters.device
        linears = {next(iter(each.modules)): each for layer in network.layers for each in layer.products}
        self._products = [(each, linears[each.name]) for each in projections(network.config)]
        for projection, linear in self._products:
            linear.adapted = self._tables(projection, network.parameters.dtype, network.parameters.device)

    @property
    def num_bytes(self) -> int:
        """Device memory that they take."""
        tables = [table for _, linear in self._products for table in _tables_of(linear)]
        return sum(table.values.nbytes for table in tables)

    @torch.inference_mode()
    def fill(self, place: int, adapter: HostAdapter) -> None:
        """Put an adapter into a place, whatever was there."""
        for projection, linear in self._products:
            a, b = _tables_of(linear)
            ranks, scales = torch.zeros_like(a.ranks[place]), torch.zeros_like(a.scales[place])
            down, up, first = torch.zeros_like(a.values[place]), torch.zeros_like(b.values[place]), 0
            for index, (name, width) in enumerate(zip(projection.modules, projection.widths, strict=True)):
                if (module := adapter.get(name)) is not None:
                    rank = len(module.a)
                    ranks[index], scales[index] = rank, module.scale
                    down[index * self._max_rank :][:rank] = module.a
                    up[first : first + width, :rank] = module.b
                first += width
            a.values[place] = down
            b.values[place] = up if linear.order is None else up.index_select(0, linear.order)
            a.ranks[place], a.scales[place] = ranks, scales

    def _tables(self, projection: Projection, dtype: torch.dtype, device: torch.device) -> Adapted:
        count, rank, widths = self.count, self._max_rank, projection.widths
        ranks = torch.zeros(count, len(widths), dtype=torch.int32, device=device)
        scales = torch.zeros(count, len(widths), device=device)
        a = torch.zeros(count, len(widths) * rank, projection.inputs, dtype=dtype, device=device)
        b = torch.zeros(count, sum(widths), rank, dtype=dtype, device=device)
        return Adapted(AdapterTable(a, ranks, scales, widths), AdapterTable(b, ranks, scales, widths), self.current)


def _tables_of(linear: Linear) -> tuple[AdapterTable, AdapterTable]:
    assert linear.adapted is not None
    return linear.adapted.a, linear.adapted.b
