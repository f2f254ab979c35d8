"""A short model of the shape of a long one: as few layers as a decode step needs to be timed like the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from pagebus.actors.model.config import ModelConfig, num_layer_weights

FEWEST = 4
"""Layers: a first, a last, and some whose neighbours are both layers."""
LEAST_BYTES = 400_000_000
"""Bytes of their weights, at least: several times an L2 cache, so that each replay reads them from memory."""
HEADS = 4
"""The layers have at least this many times the head's bytes, lest most of the step be its head."""


def shortened(config: ModelConfig) -> ModelConfig:
    """``config`` with few of its layers, of each kind its share."""
    spec = config.spec
    kept = representatives([*zip(spec.layers, config.layer_windows, strict=True)], num_layers(config))
    layers = tuple(spec.layers[place] for place in kept)
    windows = tuple(config.layer_windows[place] for place in kept)
    return replace(config, spec=replace(spec, layers=layers), num_layers=len(kept), layer_windows=windows)


def num_layers(config: ModelConfig) -> int:
    """How many are enough."""
    size = 0.5 if config.quantization is not None else 2.0  # bytes of a number, at least
    layer = size * num_layer_weights(config) / config.num_layers
    head = 2 * config.vocab_size * config.hidden_size
    return min(config.num_layers, max(FEWEST, -int(-max(LEAST_BYTES, HEADS * head) // layer)))


def representatives(kinds: Sequence[Hashable], count: int) -> list[int]:
    """The places of about ``count`` layers, given the kinds of all: the first ones of each kind, as many as its share,
    and at least one."""
    shares = {kind: max(1, round(count * number / len(kinds))) for kind, number in Counter(kinds).items()}
    seen: Counter[Hashable] = Counter()
    found = []
    for place, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= shares[kind]:
            found.append(place)
    return found
