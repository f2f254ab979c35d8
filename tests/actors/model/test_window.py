"""Which blocks a window keeps, counted token by token."""

from __future__ import annotations

import numpy as np
import pytest

from pagebus.actors.model.window import EVERYTHING, Window
from tests.actors.model.test_config import parse


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 19, 32, 33])
def test_blocks_by_tokens(window: int, size: int) -> None:
    """The first block, a match's blocks, and the most that some queries and what they see lie in."""
    kept = Window(window, size)
    for computed in range(120):
        seen = range(max(0, computed - window + 1), computed + 1)
        assert kept.first_block(computed) == seen.start // size
        assert kept.first_blocks(np.array([computed], np.int32)).tolist() == [seen.start // size]
    for queries in (1, 7, 64):
        starts = range(window, window + size)
        touched = [{place // size for place in range(at - window + 1, at + queries)} for at in starts]
        assert kept.most_blocks(queries) == max(map(len, touched))
    before = {place // size for place in range(40 * size - window + 1, 40 * size)}
    assert kept.num_matched == max(1, len(before))


def test_without_a_window_nothing_is_behind() -> None:
    """All blocks are kept, and a match has no last ones."""
    assert (EVERYTHING.first_block(1000), EVERYTHING.num_matched) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, 8),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "num_hidden_layers": 6}, 0),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "num_hidden_layers": 5}, 8),
    ],
)
def test_a_model_keeps_what_any_layer_reads(fields: dict[str, object], kept: int) -> None:
    """One layer that sees everything keeps everything."""
    assert parse(**fields).kept_window == kept
