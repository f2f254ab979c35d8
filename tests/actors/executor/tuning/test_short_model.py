"""Short models: of each kind of layer its share, and enough of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.executor.tuning.short_model import FEWEST, HEADS, LEAST_BYTES, representatives, shortened
from pagebus.actors.model.config import ModelConfig, num_layer_weights
from pagebus.actors.model.spec import Moe


def config_of(folder: Path, name: str, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return ModelConfig.load(folder)


@pytest.mark.parametrize("name", ["llama8b", "qwen06b", "gemma12b", "deepseek-v2-lite", "qwen30b-a3b"])
def test_layers_are_many_and_of_all_kinds(name: str, tmp_path: Path) -> None:
    """Their weights fill no cache, and are more than the head's, as far as there are layers."""
    config = config_of(tmp_path, name)
    short = shortened(config)
    assert set(short.spec.layers) == set(config.spec.layers)
    assert len(short.spec.layers) == len(short.layer_windows) == short.num_layers >= FEWEST
    if short.num_layers < config.num_layers - 1:
        wanted = max(LEAST_BYTES, HEADS * 2 * config.vocab_size * config.hidden_size)
        layer = 2 * num_layer_weights(config) / config.num_layers
        assert wanted <= short.num_layers * layer <= wanted + max(2, FEWEST) * layer
    assert (short.hidden_size, short.vocab_size) == (config.hidden_size, config.vocab_size)


def test_kinds_have_their_shares(tmp_path: Path) -> None:
    """Gemma 3 has five layers with a window for one without, in their order; a first dense layer stays one."""
    short = shortened(config_of(tmp_path, "gemma12b"))
    counts = Counter(bool(window) for window in short.layer_windows)
    assert counts[True] == pytest.approx(5 * counts[False], abs=3)
    feeds = [isinstance(layer.feed, Moe) for layer in shortened(config_of(tmp_path, "deepseek-v2-lite")).spec.layers]
    assert feeds == [False, *[True] * (len(feeds) - 1)]


def test_places() -> None:
    assert representatives("abababab", 4) == [0, 1, 2, 3]
    assert representatives("aaaaab" * 2, 6) == [0, 1, 2, 3, 4, 5]
    assert representatives("dmmmmmmmmm", 4) == [0, 1, 2, 3, 4]
    assert representatives("aa", 9) == [0, 1]
