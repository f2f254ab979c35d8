"""Where a model's tensors live, and which part of each comes from which tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from pagebus.actors.model.spec import NormSpec

Views: TypeAlias = dict[str, torch.Tensor]
"""Parts of tensors by the names that they have in a checkpoint."""


class Parameters:
    """Allocates the tensors of a model as its layers ask for them.

    Several tensors of a checkpoint may become one here (query, key and value projections): ``views`` maps each
    checkpoint name to the part of the allocated tensor that it fills. ``tensors`` holds every allocated tensor once.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.views: Views = {}
        self.tensors: list[torch.Tensor] = []
        self.counts: list[torch.Tensor] = []
        """What layers with experts count, in their order: [E] int32 each, tokens by expert."""
        self._ways: list[tuple[Views, Sequence[Callable[[], Views]]]] = []
        self._finishing: list[Callable[[], object]] = []

    def matrix(self, parts: Mapping[str, int], columns: int) -> torch.Tensor:
        """[sum of rows, columns]; ``parts`` maps checkpoint names to their rows, in order."""
        return self._allocate(parts, (columns,))

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
        return sum(tensor.nbytes for tensor in self.tensors)

    def _allocate(
        self, parts: Mapping[str, int], rest: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = torch.empty((sum(parts.values()), *rest), device=self.device, dtype=dtype or self.dtype)
        for name, view in zip(parts, tensor.split_with_sizes(list(parts.values())), strict=True):
            self.views[name] = view
        self.tensors.append(tensor)
        return tensor
