"""Which layers share a page, and what that saves: the table of docs/scheduling.md is computed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.executor.memory.budget import GIB, KvDemand
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache, kv_block_bytes, layer_pages
from pagebus.actors.model.cache_groups import CacheGroups, cache_groups
from pagebus.actors.model.config import ModelConfig, parse_config

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "scheduling.md").read_text()
GEMMA: dict[str, Any] = SHAPES["gemma12b"]
MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3 12B": GEMMA,
    "Gemma 3 27B": GEMMA | {"num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128},
    "gpt-oss-20b": SHAPES["gptoss20b"],
}
LENGTH, BLOCK_SIZE, STEP = 32768, 16, 2048


def config_of(fields: dict[str, Any], *, grouped: bool = True) -> ModelConfig:
    return replace(parse_config(fields, {}), grouped=grouped)


def sequence_bytes(config: ModelConfig, num_queries: int) -> int:
    """Of one sequence, while its steps compute so many tokens."""
    groups, block_bytes = config.cache_groups, kv_block_bytes(config, BLOCK_SIZE, torch.bfloat16)
    window = groups.windowed_tokens or config.kept_window
    demand = KvDemand(block_bytes, BLOCK_SIZE, LENGTH, window, num_queries, groups.windowed_pages)
    return demand.least_blocks * block_bytes


def table() -> Iterator[str]:
    """The rows of the table."""
    for name, fields in MODELS.items():
        config = config_of(fields)
        layers = config.cache_groups.page_layers
        before = sequence_bytes(config_of(fields, grouped=False), STEP) / GIB
        after = [sequence_bytes(config, queries) / GIB for queries in (STEP, 1)]
        pages = f"1 + {config.cache_groups.windowed_pages} of {layers} layers"
        yield f"| {name} | {pages} | {before:.2f} GiB | {after[0]:.2f} GiB | {after[1]:.2f} GiB |"


@pytest.mark.parametrize("row", list(table()))
def test_the_documented_saving(row: str) -> None:
    """As computed."""
    assert row in DOCUMENTED


@pytest.mark.parametrize(
    ("reaches", "pages", "page_layers"),
    [
        ((0, 0, 0), 0, 3),
        ((8, 8, 8), 0, 3),
        ((8, 0), 1, 1),
        ((8, 0, 8), 2, 1),
        ((-8, -8, -8, 0) * 2, 3, 2),
        ((8, 0, 0, 0), 0, 4),  # a page of three layers for one
        ((8, 8, 0, 0, 0), 1, 3),
        ((8,) * 31 + (0,), 0, 32),  # too many pages
    ],
)
def test_pages_by_layers(reaches: tuple[int, ...], pages: int, page_layers: int) -> None:
    """As many layers to a page as read everything, unless that wastes too much."""
    groups = cache_groups(reaches)
    assert (groups.windowed_pages, groups.page_layers) == (pages, page_layers)
    assert groups.windowed_tokens == (8 if pages else 0)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_every_layer_has_a_place_of_its_own(fields: dict[str, Any]) -> None:
    """Those without a window in the first page, the others in the rest."""
    config = config_of(fields)
    groups = config.cache_groups
    assert len(set(groups.layers)) == config.num_layers
    for (page, place), reach in zip(groups.layers, config.layer_windows, strict=True):
        assert (page > 0) == (reach != 0)
        assert page <= groups.windowed_pages
        assert 0 <= place < groups.page_layers


def test_a_page_is_as_large_as_its_layers() -> None:
    """In every number format, and a layer's keys lie at its place."""
    config = config_of(GEMMA | {"num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 64})
    whole, cpu = replace(config, grouped=False), torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        assert kv_block_bytes(whole, 16, dtype) == 6 * kv_block_bytes(config, 16, dtype)
        cache = allocate_kv_cache(config, 3, 16, dtype, cpu)
        assert cache[0].nbytes == kv_block_bytes(config, 16, dtype)
        keys, values, _ = layer_pages(cache, 1, config)
        keys.fill_(1)
        values.fill_(2)
        first, second, _ = layer_pages(cache, 0, config)
        assert keys.shape == (3, 16, 2, 64)
        assert not first.any()
        assert not second.any()


def test_nothing_is_grouped_unasked() -> None:
    """Engines whose plans name no windowed pages have pages of all layers."""
    config = config_of(GEMMA, grouped=False)
    assert config.cache_groups == CacheGroups(48, tuple((0, place) for place in range(48)))


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_the_longest_sequence_is_one_that_fits(pages: int) -> None:
    """What a message offers as the largest length fits, and one block more does not."""
    for num_blocks in (40, 100, 1000):
        demand = KvDemand(1, BLOCK_SIZE, 0, 100 if pages else 0, 32, pages)
        longest = demand.longest(num_blocks)
        assert replace(demand, max_model_len=longest).least_blocks <= num_blocks
        assert replace(demand, max_model_len=longest + BLOCK_SIZE).least_blocks > num_blocks
