"""One stage of a pipeline: which layers and tensors of a model it has, and how these share pages of the cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pagebus.actors.model.cache_groups import CacheGroups

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``index`` of ``count``, which has the ``layers`` of the whole model. ``tied``: whether its head, if it has
    one, is the embedding."""

    index: int
    count: int
    layers: range
    tied: bool

    @property
    def first(self) -> bool:
        """Whether it begins with tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it samples."""
        return self.index == self.count - 1

    @property
    def embeds(self) -> bool:
        """Whether it has the embedding's matrix."""
        return self.first or (self.last and self.tied)

    def has(self, name: str) -> bool:
        """Whether a tensor, by our name of it, is one of this stage's. What belongs to no stage is of all."""
        found = LAYER.match(name)
        if found is not None:
            return int(found[1]) in self.layers
        if name.startswith("model.embed_tokens."):
            return self.embeds
        return self.last or not name.startswith(("model.norm.", "lm_head."))


def stage_groups(whole: CacheGroups, reaches: Sequence[int], layers: range) -> CacheGroups:
    """As many pages as ``whole`` has, as the scheduler counts them, but with room for the ``layers`` alone. ``reaches``
    are those of all layers."""
    if not whole.windowed_pages:
        return CacheGroups(len(layers), tuple((0, place) for place in range(len(layers))))
    full = sum(not reaches[layer] for layer in layers)
    size = max(full, -(-(len(layers) - full) // whole.windowed_pages))
    places, seen = [], [0, 0]
    for layer in layers:
        windowed = bool(reaches[layer])
        page, place = divmod(seen[windowed], size)
        places.append((page + windowed, place))
        seen[windowed] += 1
    return CacheGroups(size, tuple(places), whole.windowed_pages, whole.windowed_tokens)


def first_layer(stage: Stage | None) -> int:
    """The number in the whole model of the first layer of a stage, or of a model that has none."""
    return 0 if stage is None else stage.layers.start
