"""Where a model's tensors live, and which part of each comes from which tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import torch

from pagebus.actors.executor.layers.quantized.weights import QuantizedPart, empty_layout
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.model.spec import NormSpec
from pagebus.kernels.quantized.layouts import Layout, Weight, num_bytes

Views: TypeAlias = dict[str, torch.Tensor]
"""Parts of tensors by the names that they have in a checkpoint."""


class Parameters:
    """Allocates the tensors of a model as its layers ask for them.

    Several tensors of a checkpoint may become one here (query, key and value projections): ``views`` maps each
    checkpoint name to the part of the allocated tensor that it fills. ``tensors`` holds every allocated tensor once.
    Weights that ``quantization`` says are quantized have layouts instead, whose ``parts`` modules of the checkpoint
    fill: each entry is a list of ways in which checkpoints name the same parts.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None,
        names: NameMap | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.dtype = dtype
        self.quantization, self.names = quantization, names or NameMap()
        self.layouts: list[Layout] = []
        self.parts: list[list[list[QuantizedPart]]] = []
        self.modules: list[str] = []
        self.views: Views = {}
        self.tensors: list[torch.Tensor] = []
        self.counts: list[torch.Tensor] = []
        """What layers with experts count, in their order: [E] int32 each, tokens by expert."""
        self._ways: list[tuple[Views, Sequence[Callable[[], Views]]]] = []
        self._finishing: list[Callable[[], object]] = []

    def matrix(self, parts: Mapping[str, int], columns: int) -> torch.Tensor:
        """[sum of rows, columns]; ``parts`` maps checkpoint names to their rows, in order."""
        return self._allocate(parts, (columns,))

    def weight(self, modules: Mapping[str, int], columns: int, *, by_rows: bool = False) -> Weight:
        """[sum of rows, columns] of a product, quantized or not; ``modules`` maps those of the checkpoint to their
        rows, in order. ``by_rows``: its rows will be reordered.

        Raises:
            ModelError: the modules are quantized in different ways.
        """
        scheme = self.scheme(tuple(modules))
        if scheme is None:
            return self.matrix({f"{name}.weight": rows for name, rows in modules.items()}, columns)
        layout = empty_layout(scheme, tuple(modules.values()), columns, self.device, by_rows=by_rows)
        self.layouts.append(layout)
        start = 0
        for name, rows in modules.items():
            part = layout.part(None, start, start + rows)
            self.parts.append([[QuantizedPart(name, self._own(name, scheme), part)]])
            start += rows
        return layout

    def expert_weight(
        self, experts: range, rows: int, columns: int, stacked: str, ways: Sequence[Sequence[str]], by_rows: str
    ) -> Layout | None:
        """[E, rows, columns] of the ``experts`` of these numbers, if they are quantized: one module has them all, or
        each has those of one of the ``ways``, such as ``...experts.{}.gate_proj``, which divide its rows evenly. Where
        a family stores them all column by column, the packing ``by_rows`` does not.

        Raises:
            ModelError: experts are quantized in different ways.
        """
        named = [[[name.format(expert) for name in names] for expert in experts] for names in ways]
        flat = [[name for names in way for name in names] for way in named]
        self.modules += [stacked, *chain.from_iterable(flat)]
        scheme = self._agreed(self._meant(flat))
        if scheme is None:
            return None
        size = len(ways[0])
        layout = empty_layout(scheme, (rows // size,) * size, columns, self.device, experts=len(experts))
        self.layouts.append(layout)
        by_columns = self.names.columns_first and scheme.packing != by_rows
        self.parts.append([[QuantizedPart(stacked, scheme, layout, by_columns)]])
        step = rows // size
        self.parts[-1] += [
            [
                QuantizedPart(name, self._own(name, scheme), layout.part(expert, place * step, (place + 1) * step))
                for expert, names in enumerate(way)
                for place, name in enumerate(names)
            ]
            for way in named
        ]
        return layout

    def chosen_parts(self, stored: Callable[[QuantizedPart], bool]) -> Iterator[QuantizedPart]:
        """Of each entry of ``parts`` the first way of which something is ``stored``; of none, its last."""
        for ways in self.parts:
            yield from next((way for way in ways if any(stored(part) for part in way)), ways[-1])

    def scheme(self, modules: Sequence[str]) -> Scheme | None:
        """Of ``modules`` that are one product; None: they are not quantized. Raises ModelError if they differ."""
        self.modules += modules
        return self._agreed(modules)

    def _agreed(self, modules: Sequence[str]) -> Scheme | None:
        return None if self.quantization is None else self.quantization.agreed(modules, self.names)

    def _meant(self, ways: Sequence[Sequence[str]]) -> Sequence[str]:
        """The way in which lists of what is quantized name experts, the family's. A list of all that there is has one
        of the ways."""
        if self.quantization is not None and self.quantization.exact is not None:
            return [name for way in ways for name in way]
        return next(way for way in ways if way[0].endswith(self.names.experts))

    def _own(self, module: str, of_product: Scheme) -> Scheme:
        """A part's scheme, where those of one product may differ."""
        exact = None if self.quantization is None else self.quantization.exact
        return of_product if exact is None else exact.get(module) or of_product

    def bias(self, parts: Mapping[str, int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """[sum of rows], in the model's own format or this."""
        return self._allocate(parts, (), dtype)

    def stored_in_ways(
        self, shape: tuple[int, ...], ways: Callable[[torch.Tensor], Sequence[Callable[[], Views]]]
    ) -> torch.Tensor:
        """A tensor that checkpoints have by different names: ``ways`` gives, of it, what makes the views of each. The
        first way counts until :meth:`find` has seen the names."""
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        self.tensors.append(tensor)
        first, *others = ways(tensor)
        views = first()
        self.views |= views
        self._ways.append((views, others))
        return tensor

    def find(self, names: Collection[str]) -> None:
        """Go by the ``names`` that a checkpoint has. Of tensors that it has in no way, the last way's are missed."""
        for place, (views, others) in enumerate(self._ways):
            if all(name in names for name in views):
                continue
            found = next((made for made in (make() for make in others) if any(name in names for name in made)), views)
            for name in views:
                del self.views[name]
            self.views |= found
            self._ways[place] = found, others

    def norm(self, name: str, size: int, spec: NormSpec) -> torch.Tensor:
        """[size]; in float32 if it is wide, or has an offset, which is added once it is loaded: 1 + w of small w would
        lose most of w in 16 bits."""
        weight = self._allocate({name: size}, (), torch.float32 if spec.offset or spec.wide else self.dtype)
        if spec.offset:
            self.after_load(lambda: weight.add_(spec.offset))
        return weight

    def count(self, size: int) -> torch.Tensor:
        """[size] int32 zeros, which are no weights; they count on and wrap around."""
        self.counts.append(torch.zeros(size, dtype=torch.int32, device=self.device))
        return self.counts[-1]

    def after_load(self, change: Callable[[], object]) -> None:
        """Have something done whenever the tensors have been filled."""
        self._finishing.append(change)

    def finish(self) -> None:
        """Do what was wanted: the tensors have been filled."""
        for change in self._finishing:
            change()

    def num_bytes(self) -> int:
        """Memory that all tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors) + sum(map(num_bytes, self.layouts))

    def _allocate(
        self, parts: Mapping[str, int], rest: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = torch.empty((sum(parts.values()), *rest), device=self.device, dtype=dtype or self.dtype)
        for name, view in zip(parts, tensor.split_with_sizes(list(parts.values())), strict=True):
            self.views[name] = view
        self.tensors.append(tensor)
        return tensor
