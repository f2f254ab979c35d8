"""The choice among tiles that the library proposes, and what happens without the library."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.cublas import binding
from pagebus.kernels.cublas.product import library_linear, set_up_library
from pagebus.kernels.cublas.tiles import MADE, SLOW, TILES, fastest, rounds, rounds_decide

NUMBERS = {(tile.rows, tile.tokens): number for number, tile in TILES.items()}
SIZES = st.integers(1, 1 << 17)


def test_full_rounds_beat_fewer_of_larger_tiles() -> None:
    """Gate and up of Llama-8B, 256 tokens: 3.9 rounds of 112 by 128, or 1.7 of 256 by 128, which take as long as 2."""
    proposed = [NUMBERS[256, 128], NUMBERS[112, 128]]
    assert rounds(TILES[proposed[0]], 28672, 256, 1, 132) == 2
    assert rounds(TILES[proposed[1]], 28672, 256, 1, 132) == 4
    assert fastest(proposed, 28672, 256, 1, 132) == 1


def test_the_first_proposal_is_taken_unless_another_is_clearly_faster() -> None:
    proposed = [NUMBERS[168, 128], NUMBERS[176, 128]]
    assert fastest(proposed, 28672, 256, 1, 132) == 0
    assert fastest([NUMBERS[256, 128], NUMBERS[112, 128]], 28672, 64, 1, 132) == 0  # memory bounds both


def test_parts_of_k_fill_one_round() -> None:
    """Down of Qwen2.5-32B in two parts: 128 tiles of 160 by 128, not 124 of 168 by 128."""
    assert rounds(TILES[MADE], 5120, 256, 2, 132) == rounds(TILES[NUMBERS[168, 128]], 5120, 256, 2, 132) == 1
    assert fastest([NUMBERS[168, 128], MADE], 5120, 256, 2, 132) == 1
    assert fastest([NUMBERS[128, 128], MADE], 4096, 256, 2, 132) == 0


def test_unknown_tiles_are_left_to_the_library() -> None:
    assert fastest([1, 2], 28672, 256, 1, 132) is None
    assert fastest([], 28672, 256, 1, 132) is None
    assert fastest([1, NUMBERS[112, 128]], 28672, 256, 1, 132) is None


def test_slow_tiles_give_way_to_any_that_is_known() -> None:
    for slow in SLOW:
        assert fastest([slow, 1, NUMBERS[112, 128]], 28672, 128, 1, 132) == 2
        assert fastest([slow, 1], 28672, 128, 1, 132) is None


@given(SIZES, SIZES, st.integers(1, 200), st.sampled_from(sorted(TILES)))
def test_rounds_hold_all_tiles_and_no_more(rows: int, tokens: int, multiprocessors: int, number: int) -> None:
    tile = TILES[number]
    tiles = -(-rows // tile.rows) * -(-tokens // tile.tokens)
    found = rounds(tile, rows, tokens, 1, multiprocessors)
    assert (found - 1) * multiprocessors < tiles <= found * multiprocessors


def test_rounds_decide_about_few_tokens_and_many_rows() -> None:
    assert rounds_decide(28672, 256, 1, 132)
    assert not rounds_decide(28672, 257, 1, 132)
    assert not rounds_decide(4096, 256, 1, 132)
    assert rounds_decide(4096, 256, 2, 132)


def test_on_a_cpu_torch_multiplies() -> None:
    set_up_library(torch.device("cpu"))
    x, weight, bias = torch.randn(300, 64), torch.randn(96, 64), torch.randn(96)
    torch.testing.assert_close(library_linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(library_linear(x, weight), F.linear(x, weight))


def test_tensors_without_memory_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they stand for a GPU whose library could be there."""
    monkeypatch.setattr(binding, "library", lambda: pytest.fail("nothing may be launched"))
    compile_for(Target(90, 132))
    try:
        x, weight = torch.empty(256, 64, device="meta").half(), torch.empty(28672, 64, device="meta").half()
        set_up_library(x.device)
        assert library_linear(x, weight).shape == (256, 28672)
    finally:
        compile_for(None)


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    binding.library.cache_clear()
    try:
        assert binding.library() is None
    finally:
        binding.library.cache_clear()


def test_a_proposal_is_as_large_as_the_library_writes_it() -> None:
    """Of cublasLt.h: 64 bytes of algorithm, a size, a status, a number of waves, and four numbers in reserve."""
    assert ctypes.sizeof(binding.Proposal) == 96
    assert binding.Proposal.state.offset == 72
