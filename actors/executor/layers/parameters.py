"""Where a model's tensors live, and which part of each comes from which tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pagebus.actors.model.spec import NormSpec


class Parameters:
    """Allocates the tensors of a model as its layers ask for them.

    Several tensors of a checkpoint may become one here (query, key and value projections): ``views`` maps each
    checkpoint name to the part of the allocated tensor that it fills. ``tensors`` holds every allocated tensor once.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.views: dict[str, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []
        self._finishing: list[Callable[[], object]] = []

    def matrix(self, parts: Mapping[str, int], columns: int) -> torch.Tensor:
        """[sum of rows, columns]; ``parts`` maps checkpoint names to their rows, in order."""
        return self._allocate(parts, (columns,))

    def bias(self, parts: Mapping[str, int]) -> torch.Tensor:
        """[sum of rows]."""
        return self._allocate(parts, ())

    def norm(self, name: str, size: int, spec: NormSpec) -> torch.Tensor:
        """[size]; in float32 if it is wide, or has an offset, which is added once it is loaded: 1 + w of small w would
        lose most of w in 16 bits."""
        weight = self._allocate({name: size}, (), torch.float32 if spec.offset or spec.wide else self.dtype)
        if spec.offset:
            self.after_load(lambda: weight.add_(spec.offset))
        return weight

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
