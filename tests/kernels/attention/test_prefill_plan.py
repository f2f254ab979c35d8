"""How prompts are cut: every query and every key of it once, into as many pieces as there is room for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.kernels.attention.paged_attention import AttentionShape, graph_configs
from pagebus.kernels.attention.prefill_plan import (
    LEAST_KEYS,
    PIECE_KEYS,
    PrefillConfig,
    QuerySpans,
    most_merges,
    most_pieces,
    num_shares,
    prefill_config,
    query_ranges,
    query_spans,
)

CONFIG = PrefillConfig(64, 64, 4, 2)
OTHERS = (prefill_config(2048, 9000, 128, 2), prefill_config(1, 1, 256, 2, float8=True), prefill_config(1, 1, 128, 4))


def cut(rows: list[tuple[int, int]], first_row: int = 0, config: PrefillConfig = CONFIG, **limits: int) -> QuerySpans:
    """Rows of (new tokens, tokens before them)."""
    counts, past = np.array(rows, np.int32).reshape(-1, 2).T
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return query_spans(starts, counts + past, query_ranges(starts, first_row), config, **limits)


def test_rows_are_cut_into_blocks_of_queries() -> None:
    """Row by row, the last block first; rows before the first one, and empty ones, have none."""
    result = cut([(1, 0), (1, 0), (10, 0), (0, 0), (4, 0)], 2, PrefillConfig(4, 16, 4, 1), shares=8)

    assert result.spans.tolist() == [[2, 8, 0, 10, -1], [2, 4, 0, 8, -1], [2, 0, 0, 4, -1], [4, 0, 0, 4, -1]]
    assert result.spans.dtype == np.int32
    assert not len(result.merges)
    assert not len(cut([(1, 5)], 1, shares=8).spans)


def test_few_queries_behind_a_long_context_are_cut_into_equal_pieces() -> None:
    """One for each program there may be, before all that is not cut; decodes have none of it."""
    result = cut([(1, 9000), (64, 15_000), (3, 0)], 1, shares=8)

    assert result.spans[:, 0].tolist() == [1] * 8 + [2]
    lengths = result.spans[:8, 3] - result.spans[:8, 2]
    assert lengths.tolist() == [1920] * 5 + [1880, 1792, 1792]
    assert result.merges.tolist() == [[1, 0, 8, 64]]


def test_programs_end_together() -> None:
    """Three blocks for eight programs: six whole shares, and parts of shares that fill the other two; longest first."""
    result = cut([(192, 24_384)], shares=8)

    lengths = result.spans[:, 3] - result.spans[:, 2]
    assert sorted(lengths, reverse=True) == lengths.tolist()
    assert lengths.tolist() == [9216] * 5 + [9088, 6272, 6016, 3136, 2944]
    assert result.merges.tolist() == [[128, 0, 3, 64], [64, 3, 4, 64], [0, 7, 3, 64]]


@pytest.mark.parametrize(
    "rows",
    [[(512, 32_256)], [(2048, 0)] * 4, [(512, 0)] * 16, [(64, 900)], [(300, 700), (1, 0)]],
    ids=["many blocks", "4 prompts", "16 prompts", "short context", "short chunk"],
)
def test_steps_that_fill_the_gpu_or_are_short_are_not_cut(rows: list[tuple[int, int]]) -> None:
    """Where blocks are as many as shares, or keys are few, all is as if nothing were ever cut."""
    assert cut(rows, shares=8).spans.tolist() == cut(rows).spans.tolist()
    assert not len(cut(rows, shares=8).merges)


def test_a_long_row_is_cut_beside_many_short_ones() -> None:
    """However many blocks there are: what counts is that one has far more keys than its share."""
    result = cut([(20, 0)] * 100 + [(64, 15_000)], shares=8)

    assert result.merges.tolist() == [[2000, 0, 7, 64]]
    assert len(result.spans) == 107


def test_no_more_spans_than_there_is_room_for() -> None:
    """A bucket that holds the blocks holds them cut as well, into fewer pieces if need be."""
    rows = [(64, 15_000), (64, 15_000)]

    assert [len(cut(rows, shares=8, most_spans=most).spans) for most in (2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8]


row = st.tuples(st.integers(0, 700), st.one_of(st.integers(0, 3000), st.integers(0, 131_072)))


@given(
    st.lists(row, max_size=8), st.integers(0, 3), st.sampled_from((CONFIG, *OTHERS)), st.integers(0, 140),
    st.integers(0, 40), st.sampled_from((PIECE_KEYS, LEAST_KEYS)),
)  # fmt: skip
def test_every_key_of_every_block_once(
    rows: list[tuple[int, int]], first_row: int, config: PrefillConfig, shares: int, spare: int, least_keys: int
) -> None:
    """Pieces follow each other from the first key to the block's last, none of them shorter than it may be, within all
    limits; merges name each block that is cut, its pieces and its queries."""
    first_row, size = min(first_row, len(rows)), config.block_queries
    starts = [0, *itertools.accumulate(count for count, _ in rows)]
    blocks = {
        (number, query): (starts[number] + query, past + min(count, query + size), min(size, count - query))
        for number, (count, past) in enumerate(rows)
        for query in range(0, count, size)
        if number >= first_row
    }  # (row, first query): first token, keys, queries

    result = cut(rows, first_row, config, shares=shares, least_keys=least_keys, most_spans=len(blocks) + spare)

    spans, merges = result.spans.tolist(), result.merges.tolist()
    assert len(spans) <= len(blocks) + spare
    assert len(merges) <= most_merges(shares)
    assert sum(count for _, _, count, _ in merges) <= most_pieces(shares)
    pieces = [span for span in spans if span[4] >= 0]
    assert [span[4] >= 0 for span in spans] == [number < len(pieces) for number in range(len(spans))]
    pieces.sort(key=lambda span: span[4])
    assert [span[4] for span in pieces] == list(range(len(pieces)))
    divided = 0
    for token, first, count, queries in merges:
        mine = pieces[first : first + count]
        assert first == divided
        assert count > 1
        assert len({(number, query) for number, query, *_ in mine}) == 1
        assert (token, mine[-1][3], queries) == blocks.pop((mine[0][0], mine[0][1]))
        assert [begin for _, _, begin, _, _ in mine] == [0, *(end for _, _, _, end, _ in mine[:-1])]
        assert all(begin % PIECE_KEYS == 0 for _, _, begin, _, _ in mine)
        assert all(end - begin >= least_keys for _, _, begin, end, _ in mine)
        divided += count
    assert divided == len(pieces)
    assert spans[divided:] == [
        [number, query, 0, keys, -1]
        for (number, query), (_, keys, _) in sorted(blocks.items(), key=lambda block: (block[0][0], -block[0][1]))
    ]


def test_shares_fill_the_multiprocessors_once() -> None:
    """Two programs of 64 queries per multiprocessor, one of 128; long chunks are never cut."""
    assert [num_shares(CONFIG, heads, 132) for heads in (32, 28, 16, 4, 500)] == [8, 9, 16, 66, 0]
    assert [num_shares(config, 8, 132) for config in OTHERS] == [0, 16, 33]


def test_tiles_of_other_gpus() -> None:
    """Those of GPUs whose tensor cores take factors from registers are smaller, and the kernels' limits hold: pieces
    begin at multiples of a tile. On Hopper nothing depends on the GPU."""
    for head_dim, queries in ((64, 512), (96, 512), (128, 512), (128, 9000), (256, 512)):
        hopper = prefill_config(queries, queries, head_dim, 2)
        for capability in (80, 86, 89, 120):
            config = prefill_config(queries, queries, head_dim, 2, capability=capability)
            assert config.block_queries * config.tile <= hopper.block_queries * hopper.tile
            assert PIECE_KEYS % config.tile == 0
            assert num_shares(config, 8, 132) > 0
        assert prefill_config(queries, queries, head_dim, 2, capability=100) == hopper
    assert prefill_config(9, 9, 256, 4, capability=80) == prefill_config(9, 9, 256, 4)


@pytest.mark.parametrize(("q_heads", "kv_heads", "shares"), [(40, 8, 16), (24, 8, 16), (28, 4, 33), (32, 8, 16)])
def test_shares_of_groups_of_any_size(q_heads: int, kv_heads: int, shares: int) -> None:
    """Of five heads in a tile for eight a program has those of one KV head. Programs are no more than fit at once, and
    there is room for the pieces, also in a model with fewer query heads and more KV heads that drafts."""
    shape = AttentionShape(q_heads, kv_heads, 128, 2)
    config = shape.few()
    assert shape.shares(config, 132) == shares
    assert shares * kv_heads <= 132
    for other in (shape, AttentionShape(q_heads - kv_heads, kv_heads, 64, 2), AttentionShape(24, 24, 64, 2)):
        assert other.pieces(config, 132) >= most_pieces(shares)


def test_few_tokens_behind_a_long_past_have_a_launch_shape() -> None:
    """On Hopper GPUs, where heads share keys and some layer sees all of them."""
    shape = AttentionShape(32, 8, 128, 2)
    configs = graph_configs(shape)
    assert configs[True] == PrefillConfig(block_queries=32, tile=64, num_warps=8, num_stages=3, heads=4)
    assert (shape.shares(configs[False], 132), shape.shares(configs[True], 132)) == (8, 16)
    assert list(graph_configs(shape, invariant=True)) == [False]
    for other in (
        AttentionShape(32, 32, 128, 2), AttentionShape(32, 8, 256, 2), AttentionShape(32, 8, 128, 4),
        AttentionShape(32, 8, 128, 2, float8=True), AttentionShape(32, 8, 128, 2, capability=120),
        AttentionShape(32, 8, 128, 2, frozenset({4096})),
    ):  # fmt: skip
        assert list(graph_configs(other)) == [False]
