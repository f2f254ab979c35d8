"""Attention of decodes that norms, rotates and caches the newest tokens itself, against its reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagebus.kernels.attention.decode import decode_attention
from pagebus.kernels.attention.decode_plan import plan_decodes
from pagebus.kernels.attention.forms.launch import DecodeConfig
from pagebus.kernels.attention.paged_attention import AttentionShape, plan_attention
from pagebus.kernels.attention.rotary_attention import rotary_attention, rotary_attention_reference
from tests.kernels.attention.cases import make_case

LENS = [17, 1, 150, 0, 64, 65, 1]
NOWHERE = 6
"""The row whose table names no block."""

CASES: dict[str, dict[str, Any]] = {
    "norms": {"q_heads": 6, "kv_heads": 2, "head_dim": 64, "norms": True},
    "half_norms_window": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "norms": True,
                          "window": 50},
    "half_chunks": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "norms": True, "window": -50},
    "wide_norms_softcap": {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.float16, "norms": True,
                           "wide": True, "softcap": 0.7},
    "sinks": {"q_heads": 6, "kv_heads": 2, "head_dim": 64, "sinks": True},
    "sinks_half_int8_window": {"q_heads": 6, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "window": 50,
                               "cache_dtype": torch.int8, "sinks": True},
    "block_48": {"q_heads": 7, "kv_heads": 1, "head_dim": 32, "block_size": 48},
    "float8": {"q_heads": 3, "kv_heads": 1, "head_dim": 64, "cache_dtype": torch.float8_e4m3fn},
    "float8_half_window": {"q_heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50,
                           "cache_dtype": torch.float8_e5m2},
    "int8": {"q_heads": 3, "kv_heads": 1, "head_dim": 64, "cache_dtype": torch.int8},
    "int8_half_window": {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "window": 50,
                         "cache_dtype": torch.int8},
    "int8_half_block_48": {"q_heads": 7, "kv_heads": 1, "head_dim": 32, "dtype": torch.float16, "block_size": 48,
                           "cache_dtype": torch.int8},
    "eight": {"q_heads": 16, "kv_heads": 2, "head_dim": 64, "norms": True},
    "sixteen_half_window": {"q_heads": 16, "kv_heads": 1, "head_dim": 32, "dtype": torch.float16, "window": 50},
    "twelve_wide_norms": {"q_heads": 12, "kv_heads": 1, "head_dim": 32, "norms": True, "wide": True},
    "eight_float8": {"q_heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16,
                     "cache_dtype": torch.float8_e4m3fn},
    "eight_int8": {"q_heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16, "cache_dtype": torch.int8},
    "head_80": {"q_heads": 3, "kv_heads": 1, "head_dim": 80, "dtype": torch.float16, "norms": True},
    "head_96_int8": {"q_heads": 4, "kv_heads": 2, "head_dim": 96, "dtype": torch.float16, "cache_dtype": torch.int8},
    "head_96_float8": {"q_heads": 3, "kv_heads": 1, "head_dim": 96, "cache_dtype": torch.float8_e4m3fn},
    "eight_head_48_window": {"q_heads": 8, "kv_heads": 1, "head_dim": 48, "norms": True, "window": 50},
}  # fmt: skip


def make(device: torch.device, *, norms: bool = False, wide: bool = False, **shape: Any) -> dict[str, Any]:
    """Arguments of one call; where new tokens go, the cache is NaN, or its scales are. What goes into a cache of one
    byte needs no rounding there (the interpreter's is wrong): quarter turns, and multiples of a quarter or, in int8, of
    a 127th of the largest number."""
    case = make_case(LENS, [1] * len(LENS), **shape, device=device)
    (q_heads, head_dim), (block_size, kv_heads) = case.q.shape[1:], case.k_cache.shape[1:3]
    names = "slots", "context_lens", "block_tables", "scale", "sliding_window", "softcap", "sinks", "kv_scales"
    words = {name: case.keywords[name] for name in names}
    words["block_tables"][words["slots"][NOWHERE]] = -1
    case.k_cache[0], case.v_cache[0] = 0, 0  # is read instead
    if case.k_cache.dtype == torch.int8:
        words["kv_scales"][:, 0] = 1.0
    for row, length in enumerate(LENS):
        block = int(words["block_tables"][words["slots"][row], max(0, length - 1) // block_size])
        if length and block >= 0:
            poisoned = words["kv_scales"] if case.k_cache.dtype == torch.int8 else (case.k_cache, case.v_cache)
            for part in poisoned:
                part[block, (length - 1) % block_size] = torch.nan
    qkv = torch.randn(len(LENS), q_heads + 2 * kv_heads, head_dim, device=device)
    angles = torch.rand(max(LENS), head_dim // 2, device=device) * 6
    if words["kv_scales"] is not None:
        most = 127 if case.k_cache.dtype == torch.int8 else 7
        qkv = torch.randint(-most, most + 1, qkv.shape, device=device) * (2 / (most + 1))
        qkv[..., :1] = 2 * most / (most + 1)
        angles = torch.randint(0, 4, angles.shape, device=device) * (torch.pi / 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    if words["kv_scales"] is not None:
        cos_sin = cos_sin.round()
    words |= {"qkv": qkv.to(case.q.dtype), "cos_sin": cos_sin, "k_cache": case.k_cache, "v_cache": case.v_cache}
    if norms:
        weights = torch.randn(2, head_dim, device=device).to(torch.float32 if wide else case.q.dtype)
        words |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-2}
    return words


def check(words: dict[str, Any], attend: Callable[..., torch.Tensor]) -> None:
    """The reference's results and the reference's cache; rows of nothing write nothing."""
    mine, other = copy.deepcopy(words), copy.deepcopy(words)
    result, expected = attend(**mine), rotary_attention_reference(**other)
    rows = [row for row, length in enumerate(LENS) if length and row != NOWHERE]  # that sees whatever is in block 0
    tolerance = 3e-6 if result.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(result[rows], expected[rows], atol=tolerance, rtol=1e-3)
    int8 = words["k_cache"].dtype == torch.int8
    poisoned = ["kv_scales"] if int8 else ["k_cache", "v_cache"]
    assert not any(torch.equal(mine[name].isnan(), words[name].isnan()) for name in poisoned)
    for name in ("k_cache", "v_cache", *poisoned):
        torch.testing.assert_close(mine[name].float(), other[name].float(), atol=tolerance, rtol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_reference(name: str, device: torch.device) -> None:
    """Norms, sliding windows, odd heads and blocks, both float8 formats, int8."""
    words = make(device, **CASES[name])
    q_heads = words["qkv"].shape[1] - 2 * words["k_cache"].shape[2]
    shape = AttentionShape(
        q_heads, words["k_cache"].shape[2], words["qkv"].shape[2], words["qkv"].element_size(),
        frozenset({words["sliding_window"]}), float8=words["kv_scales"] is not None,
    )  # fmt: skip
    plan = plan_attention(words["slots"], words["context_lens"], shape, settled=False)
    check(words, lambda **given: rotary_attention(**given, plan=plan))


@pytest.mark.parametrize(("tile", "programs", "apart"), [(16, 40, False), (64, 3, False), (64, 40, True)])
def test_any_plan_gives_the_same(tile: int, programs: int, apart: bool, device: torch.device) -> None:
    """However rows are cut, the one program with a row's last piece writes its key and value."""
    words = make(device, q_heads=3, kv_heads=1, head_dim=32, window=100, sinks=True)
    config = DecodeConfig(tile, programs, num_warps=2, num_stages=2, apart=apart)
    plan = plan_decodes(words["slots"], words["context_lens"], 3, 1, 32, config, 100)

    def attend(**given: Any) -> torch.Tensor:
        out = torch.full((len(LENS), 3, 32), torch.nan, device=device)
        decode_attention(
            given["qkv"], given["k_cache"], given["v_cache"], out, given["block_tables"], given["scale"], 100, plan,
            cos_sin=given["cos_sin"], sinks=given["sinks"],
        )  # fmt: skip
        return out

    check(words, attend)
