"""What the kernel for long prompts is given to do; what it makes of it is tested on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagebus.kernels.attention import hopper_prefill, paged_attention
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.hopper_kernel import tile_of
from pagebus.kernels.attention.hopper_prefill import (
    LEAST_TILES,
    QUERIES,
    ROWS,
    TOGETHER,
    HeadShape,
    faster_rows,
    groups,
    make_work,
    scratch_bytes,
    seen_keys,
    supports,
)
from pagebus.kernels.attention.paged_attention import AttentionPlan, AttentionShape, Spans, plan_attention
from pagebus.kernels.attention.prefill_plan import prefill_config
from pagebus.kernels.common import target
from pagebus.kernels.common.target import Target
from tests.kernels.attention.cases import make_case

pytestmark = pytest.mark.share(6)

TILE = tile_of(128)


def rows_of(*lens: tuple[int, int]) -> tuple[LongRow, ...]:
    """Rows of (queries, context), one behind the other."""
    starts = np.cumsum([0, *(queries for queries, _ in lens)])
    return tuple(LongRow(row, int(start), *of) for row, (start, of) in enumerate(zip(starts, lens, strict=False)))


@pytest.mark.parametrize(("q_heads", "tile", "window"), [(8, 128, 0), (32, 64, 0), (16, 128, 4096), (16, 64, 300)])
@pytest.mark.parametrize(
    "lens",
    [[(1, 1)], [(77, 77)], [(300, 1000)], [(8192, 8192)], [(8192, 65536)], [(6872, 15064)], [(128, 5000), (129, 129)],
     [(2048, 2048)] * 4, [(64, 15064)], [(1000, 40000), (50, 60)]],
)  # fmt: skip
def test_work_covers_what_queries_see(lens: list[tuple[int, int]], q_heads: int, tile: int, window: int) -> None:
    """Each query of a row, with each tile of keys from its window's first up to its own, once: whole, or in pieces that
    are merged. Keys before a row's first window are not among those that are read."""
    rows = rows_of(*lens)
    work = make_work(rows, q_heads, 132, tile, window)
    tiles = work.spans[:, 5] - work.spans[:, 4]
    assert (np.diff(tiles) <= 0).all()
    assert (tiles > 0).all()
    merged = {int(token): (range(first, first + count), queries) for token, first, count, queries in work.merges}
    used = [piece for pieces, _ in merged.values() for piece in pieces]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(work.pieces))
    key = 0
    for row in rows:
        for first in range(0, row.num_queries, QUERIES):
            mine = work.spans[work.spans[:, 0] == row.first_token + first]
            mine = mine[np.argsort(mine[:, 4])]
            count, position = min(QUERIES, row.num_queries - first), row.context_len - row.num_queries + first
            assert (mine[:, 1] == count).all()
            read_from = max(0, row.past - window + 1) // tile * tile if window else 0
            assert (mine[:, 2] == key - read_from).all()
            assert (mine[:, 3] == position).all()
            assert mine[0, 4] == (max(0, position - window + 1) // tile if window else 0)
            assert mine[0, 4] * tile >= read_from
            assert mine[-1, 5] == -(-(position + count) // tile)
            assert (mine[1:, 4] == mine[:-1, 5]).all()
            # The first query sees a key of each piece, and so does the last.
            assert (mine[:, 4] * tile <= position).all()
            assert (mine[:, 5] * tile > (max(0, position + count - window) if window else 0)).all()
            token = row.first_token + first
            if token not in merged:
                assert list(mine[:, 6]) == [-1]
                continue
            assert merged[token] == (range(mine[0, 6], mine[-1, 6] + 1), min(count, ROWS))
            assert (mine[:, 7] == len(mine)).all()
            if count > ROWS:
                assert merged[token + ROWS] == (range(mine[-1, 6] + 1, mine[-1, 6] + 1 + len(mine)), count - ROWS)
        key += -(-row.context_len // tile) * tile - read_from
    whole = work.spans[work.spans[:, 6] < 0]
    assert len(whole) + len(work.merges) // 2 <= sum(-(-row.num_queries // QUERIES) for row in rows)


@pytest.mark.parametrize(("q_heads", "queries", "context"), [(32, 8192, 131072), (32, 6872, 15064), (16, 8192, 8192)])
def test_programs_end_together(q_heads: int, queries: int, context: int) -> None:
    """Within 3% of what each would have to do if work could be cut anywhere; without cuts it can be far more."""
    spans = make_work(rows_of((queries, context)), q_heads, 132, TILE).spans
    tiles = spans[:, 5] - spans[:, 4]
    work = np.repeat(tiles, q_heads)
    mine = [work[place::264].sum() + work[263 - place :: 264].sum() for place in range(132)]
    assert max(mine) <= 1.03 * work.sum() / 132


def test_pieces_are_worth_it() -> None:
    """None of few tiles, and none where all programs are busy anyway."""
    work = make_work(rows_of((8192, 131072)), 32, 132, TILE)
    cut = work.spans[work.spans[:, 6] >= 0]
    assert len(cut)
    assert (cut[:, 5] - cut[:, 4] >= LEAST_TILES).all()
    assert make_work(rows_of((8192, 8192)), 32, 132, TILE).pieces == 0


def test_rows_go_together_while_their_keys_fit() -> None:
    rows = rows_of((10, 30000), (10, 30000), (10, 70000), (10, 30000), (10, 5000), (10, 30600))
    assert groups(rows, TILE) == [rows[:2], rows[2:3], rows[3:5], rows[5:]]
    assert groups(rows, TILE, window=4096) == [rows]
    for group in groups(rows, TILE):
        keys = sum(-(-row.context_len // TILE) * TILE for row in group)
        assert len(group) == 1 or keys <= TOGETHER


def test_memory_for_copies_is_known_before() -> None:
    """Of the longest context alone, or of rows that go together."""
    assert scratch_bytes(8192, 131072, 32, 8, 128, 2) >= 2 * 131072 * 8 * 128 * 2
    assert scratch_bytes(8192, 4096, 32, 8, 128, 2) >= 2 * TOGETHER * 8 * 128 * 2
    assert scratch_bytes(8192, 131072, 32, 8, 96, 2) >= 2 * 131072 * 8 * 128 * 2


def test_where_it_is_taken() -> None:
    """Heads of 64 to 256 in half precision, on Hopper."""
    hopper = Target(90, 132)
    for head_dim in (64, 80, 96, 128, 192, 256):
        assert supports(torch.bfloat16, head_dim, hopper)
        assert supports(torch.float16, head_dim, hopper)
    assert not supports(torch.float32, 128, hopper)
    assert not supports(torch.bfloat16, 32, hopper)
    assert not supports(torch.bfloat16, 512, hopper)
    assert not supports(torch.bfloat16, 100, hopper)
    assert not supports(torch.bfloat16, 128, None)
    assert not supports(torch.bfloat16, 128, Target(80, 108))


def test_rows_are_taken_where_it_is_faster() -> None:
    """Each by itself, and all of them if they save more than a call costs."""

    def taken(*lens: tuple[int, int]) -> list[int]:
        found = faster_rows(rows_of(*lens), HeadShape(32, 8, 128))
        assert all(row.for_hopper for row in found)
        return [row.row for row in found]

    assert taken((8192, 8192)) == taken((2048, 2048)) == taken((8192, 131072)) == [0]
    assert taken((100, 100), (4096, 9000), (64, 15064), (2048, 2048)) == [1, 3]
    assert taken((64, 15064)) == taken((512, 512)) == []


@pytest.mark.parametrize("lens", [(1, 1), (100, 100), (300, 1000), (1, 5000), (5000, 5000), (700, 1023)])
@pytest.mark.parametrize("window", [0, 1, 300, 1024, 10000])
def test_pairs_that_a_rate_counts(lens: tuple[int, int], window: int) -> None:
    queries, context = lens
    seen = (min(position + 1, window or context) for position in range(context - queries, context))
    assert seen_keys(LongRow(0, 0, queries, context), window) == sum(seen)


def test_windows_of_some_layers() -> None:
    """A long prompt of Gemma 3, five layers in six of which see 1024 keys, is taken; a short one is not."""
    gemma = HeadShape(16, 8, 256, (1024,) * 5 + (0,))
    assert len(faster_rows(rows_of((2048, 2048), (8192, 32768)), gemma)) == 2
    assert faster_rows(rows_of((100, 100)), gemma) == ()


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_what_is_copied_is_seen(head_dim: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows behind a past: whole tiles, padded heads, and zeros where no key is seen."""
    monkeypatch.setattr(target, "_absent", Target(90, 132))
    tile, padded = tile_of(head_dim), {96: 128}.get(head_dim, head_dim)
    lens, seen = [(300, 1100), (200, 200), (256, 1280)], []
    case = make_case(
        [context for _, context in lens], [queries for queries, _ in lens], q_heads=4, kv_heads=2, head_dim=head_dim,
        dtype=torch.float16,
    )  # fmt: skip
    words, rows = case.keywords, rows_of(*lens)
    k, v = hopper_prefill._copied(
        case.k_cache, case.v_cache, torch.float16, words["slots"], words["block_tables"], rows, None, window
    )
    spans = make_work(rows, 4, 132, tile, window).spans
    assert k.shape == v.shape == (len(k), 2, padded)
    assert not k.isnan().any()
    assert not v.isnan().any()
    assert not k[..., head_dim:].any()
    for row in rows:
        (base,) = {int(span[2]) for span in spans if row.first_token <= span[0] < row.tokens.stop}
        first = max(0, row.past - window + 1) if window else 0
        table = words["block_tables"][words["slots"][row.row]].long()
        place = torch.arange(first, row.context_len)
        for copies, cache in ((k, case.k_cache), (v, case.v_cache)):
            assert torch.equal(copies[base + place, :, :head_dim], cache[table[place // 16], place % 16])
        seen.append(base + place)
    hidden = torch.ones(len(k), dtype=torch.bool)
    hidden[torch.cat(seen)] = False
    assert not k[hidden].any()
    assert not v[hidden].any()


@pytest.mark.parametrize("for_hopper", [True, False])
def test_who_takes_what_is_left_out(for_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are marked as our own go to our kernel, others to the library; decodes beside them to theirs."""
    asked: list[str] = []
    for name, module, function in (
        ("decode", paged_attention, "decode_attention"), ("long", hopper_prefill, "hopper_attention"),
        ("library", paged_attention, "cudnn_attention"), ("prefill", paged_attention, "prefill_attention"),
    ):  # fmt: skip
        monkeypatch.setattr(module, function, lambda *_, name=name, **__: asked.append(name))
    ints = {"dtype": torch.int32, "device": "meta"}
    cache, q = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 16, 8, 128), (4097, 32, 128))
    )
    empty = torch.empty(0, **ints)
    spans = Spans(prefill_config(4096, 4096, 128, 2), torch.empty(0, 5, **ints), torch.empty(0, 4, **ints))
    plan = plan_attention(empty, empty, AttentionShape(32, 8, 128, 2), spans)
    paged_attention.paged_attention(
        q, cache, cache, slots=torch.empty(2, **ints), query_start=torch.empty(3, **ints),
        context_lens=torch.empty(2, **ints), block_tables=torch.empty(4, 512, **ints), scale=0.1,
        num_decodes=1, long_rows=[LongRow(1, 1, 4096, 4096, for_hopper)],
        plan=AttentionPlan({0: None}, plan.prefills),  # type: ignore[dict-item]
    )  # fmt: skip
    assert asked == ["decode", "prefill", "long" if for_hopper else "library"]


@pytest.mark.parametrize(
    ("lens", "copied"),
    [([(2048, 2048), (2048, 2048)], False), ([(256, 256), (1024, 1024)], False), ([(2048, 4096)], True),
     ([(2000, 2000)], True), ([(256, 256), (300, 300)], True)],
)  # fmt: skip
def test_keys_of_whole_tiles_are_not_copied(
    lens: list[tuple[int, int]], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the projections left those of prompts without a past: one behind the other, as copies would be."""
    monkeypatch.setattr(target, "_absent", Target(90, 132))
    copies: list[object] = []
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(hopper_prefill, "gather_tokens", lambda *_: copies.append(_))
    monkeypatch.setattr(hopper_prefill, "launch_hopper_attention", lambda q, k, v, *_: seen.extend((k, v)))
    monkeypatch.setattr(hopper_prefill, "merge_blocks", lambda *_: None)
    rows = tuple(row._replace(first_token=row.first_token + 3) for row in rows_of(*lens))
    tokens = rows[-1].tokens.stop + 5
    qkv = torch.empty(tokens, 48, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    slots, tables = torch.empty(4, device="meta"), torch.empty(4, 512, device="meta")
    hopper_prefill.hopper_attention(
        qkv[:, :32], cache, cache, qkv[:, :32], slots, tables, 0.1, rows, None, (qkv[:, 32:40], qkv[:, 40:])
    )
    assert bool(copies) == copied
    for keys, heads in zip(seen, (32, 40), strict=True):
        whole = sum(-(-context // TILE) * TILE for _, context in lens)
        assert len(keys) == whole
        if not copied:
            assert keys.stride() == qkv.stride()
            assert keys.storage_offset() == 3 * qkv.stride(0) + heads * 128
