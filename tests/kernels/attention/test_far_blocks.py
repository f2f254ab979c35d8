"""Blocks of a cache that lie more than 2^31 numbers apart: places are counted in 64 bits. The GPU's test has a cache of
this size; here only what is touched takes memory."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch

from pagebus.kernels.attention.gather import gather_tokens
from pagebus.kernels.attention.paged_attention import AttentionShape, paged_attention, plan_attention
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.common.int8 import split_blocks
from pagebus.kernels.layers import rotary_kv_write as writing
from tests.kernels.attention.cases import AttentionCase, make_case

STRIDE = 2**30 + 64
BEFORE = 4 * 2**32
"""Bytes: numbers of 32 bits are the largest that kernels read there."""
NO_RESERVE = 0x4000
"""Linux's flag of a mapping for which no memory is set aside."""
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it"),
    pytest.mark.skipif(sys.platform != "linux", reason="other mappings"),
]
CACHES = [None, torch.float8_e4m3fn, torch.int8]

Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def sparse(count: int, dtype: torch.dtype) -> torch.Tensor:
    """So many numbers, behind all that places would reach back to which have lost their upper bits."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, BEFORE + dtype.itemsize * count, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space: {error}")
    return torch.frombuffer(memory, dtype=dtype, offset=BEFORE)


def far(case: AttentionCase) -> Cache:
    """The cache of ``case`` again, its blocks far apart."""
    base, scales = case.k_cache._base, case.keywords["kv_scales"]
    assert base is not None
    whole = sparse(len(base) * STRIDE, base.dtype).as_strided(base.shape, (STRIDE, *base.stride()[1:]))
    whole.view(torch.uint8).copy_(base.view(torch.uint8))
    if base.dtype == torch.int8:
        numbers, all_scales = split_blocks(whole, 3, *case.k_cache.shape[2:])
        return numbers[:, 1, 0], numbers[:, 1, 1], all_scales[1]
    return whole[:, 1, 0], whole[:, 1, 1], scales


def case_of(cache: torch.dtype | None, query_lens: list[int]) -> AttentionCase:
    return make_case(
        [33, 20][: len(query_lens)], query_lens, q_heads=4, kv_heads=2, head_dim=32, dtype=torch.float16,
        cache_dtype=cache,
    )  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
def test_reading(cache: torch.dtype | None) -> None:
    """Decodes and prompts attend as over blocks side by side; copies are the same."""
    case = case_of(cache, [1, 18])
    k_cache, v_cache, scales = far(case)
    near, words = (case.k_cache, case.v_cache, case.keywords["kv_scales"]), dict(case.keywords)
    expected = paged_attention(case.q, *near[:2], **words)
    assert torch.equal(paged_attention(case.q, k_cache, v_cache, **words | {"kv_scales": scales}), expected)
    copies = torch.zeros(2, 2, 30, 2, 32, dtype=torch.float16)
    for (k, v), (keys, values, by) in zip(copies, (near, (k_cache, v_cache, scales)), strict=True):
        gather_tokens(keys, values, words["slots"][:1], 3, k, v, words["block_tables"], by)
    assert torch.equal(*copies)


@pytest.mark.parametrize("way", ["fused", "few", "many"])
@pytest.mark.parametrize("cache", CACHES)
def test_writing(cache: torch.dtype | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys and values go where they would in blocks side by side, by each of the kernels."""
    case = case_of(cache, [1, 1])
    words: dict[str, Any] = {name: case.keywords[name] for name in ("slots", "context_lens", "block_tables")}
    qkv, cos_sin = torch.randn(2, 8, 32).half(), torch.randn(40, 32)
    monkeypatch.setattr(writing, "MANY_TOKENS", 1 if way == "many" else 9)
    blocks = words["block_tables"][words["slots"].long(), (words["context_lens"] - 1) // 16]
    mapping = blocks.long() * 16 + (words["context_lens"] - 1) % 16

    def write(keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> list[torch.Tensor]:
        given = qkv.clone(), cos_sin, keys, values
        if way == "fused":
            shape = AttentionShape(4, 2, 32, 2, float8=scales is not None)
            plan = plan_attention(words["slots"], words["context_lens"], shape, settled=False)
            told = rotary_attention(*given, **words, scale=0.2, kv_scales=scales, plan=plan)
        else:
            positions = words["context_lens"] - 1
            told = writing.rotary_kv_write(given[0], positions, *given[1:], mapping, kv_scales=scales)
        place = blocks.long(), (words["context_lens"] - 1).long() % 16
        parts = [keys[place].view(torch.uint8), values[place].view(torch.uint8)]
        return [told, *parts, *(scales[:, *place] for _ in range(cache == torch.int8) if scales is not None)]

    apart = write(*far(case))
    near = write(case.k_cache, case.v_cache, case.keywords["kv_scales"])
    assert all(torch.equal(*each) for each in zip(apart, near, strict=True))
