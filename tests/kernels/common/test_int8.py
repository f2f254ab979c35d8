"""A cache in int8: how numbers and scales lie in its blocks, what is lost, and what the kernels write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagebus.kernels.layers.rotary_kv_write
from pagebus.kernels.common.int8 import block_bytes, check_scales, from_int8_reference, split_blocks, to_int8_reference
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write, rotary_kv_write_invariant, rotary_kv_write_reference

LAYERS, KV_HEADS, Q_HEADS, LAYER = 3, 3, 5, 1


def make_blocks(block_size: int, head_dim: int, device: torch.device) -> torch.Tensor:
    size = block_bytes(LAYERS, block_size, KV_HEADS, head_dim)
    return torch.randint(-128, 128, (9, size), dtype=torch.int8, device=device)


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (48, 80), (128, 16)])
def test_a_block_is_one_piece(block_size: int, head_dim: int) -> None:
    """Every byte of a block belongs to one number or one scale, of that block alone: numbers first."""
    blocks = make_blocks(block_size, head_dim, torch.device("cpu"))
    numbers, scales = split_blocks(blocks, LAYERS, KV_HEADS, head_dim)
    assert numbers.shape == (9, LAYERS, 2, block_size, KV_HEADS, head_dim)
    assert scales.shape == (LAYERS, 2, 9, block_size, KV_HEADS)
    before = blocks.clone()
    numbers[4], scales[:, :, 4] = 1, 2.0
    assert torch.equal(blocks[[0, 1, 2, 3, 5, 6, 7, 8]], before[[0, 1, 2, 3, 5, 6, 7, 8]])
    count = numbers[0].numel()
    assert bool((blocks[4, :count] == 1).all())
    assert bool((blocks[4, count:].view(torch.bfloat16) == 2).all())
    assert blocks.shape[1] == count + 2 * scales[:, :, 0].numel()
    check_scales(numbers[:, LAYER, 0], scales[LAYER])
    assert blocks.stride(0) % 64 == 0  # rows of 16 bytes and pairs of scales stay whole


def test_what_is_lost() -> None:
    """At most a bit more than half a step of a 127th of a head's largest number, whatever its size; zeros stay."""
    for size in (1e-12, 1e-3, 1.0, 3e4, 1e30):
        heads = torch.randn(50, KV_HEADS, 64) * size
        heads[3, 1] = 0.0
        step = heads.abs().amax(2, keepdim=True) / 127
        for part in range(2):
            numbers, scales = to_int8_reference(heads, part)
            back = from_int8_reference(numbers, scales, part)
            assert bool(((back - heads).abs() <= 0.51 * step).all())
            assert bool((back[3, 1] == 0).all())


def test_values_have_no_sign() -> None:
    """As bytes without a sign they are 128 more than they stand for."""
    numbers, _scales = to_int8_reference(torch.tensor([[-127.0, 0.0, 127.0]]), 1)
    assert numbers.view(torch.uint8).tolist() == [[1, 128, 255]]


def run(function: Any, blocks: torch.Tensor, head_dim: int, qkv: torch.Tensor, mapping: torch.Tensor) -> torch.Tensor:
    """The blocks after a call that turns by quarters."""
    blocks, generator = blocks.clone(), torch.Generator().manual_seed(0)
    numbers, scales = split_blocks(blocks, LAYERS, KV_HEADS, head_dim)
    turns = torch.randint(0, 4, (50, head_dim // 2), generator=generator)
    table = torch.tensor([1.0, 0.0, -1.0, 0.0])
    angles = torch.cat((table[turns], table[(turns + 3) % 4]), 1).to(blocks.device)
    positions = torch.tensor([0, 49, 3, 3, 17, 8], dtype=torch.int32, device=blocks.device)
    k_cache, v_cache = numbers[:, LAYER].unbind(1)
    function(qkv.clone(), positions, angles, k_cache, v_cache, mapping, kv_scales=scales[LAYER])
    return blocks


@pytest.mark.parametrize("many_tokens", [1, 7], ids=["many tokens", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 48)])
def test_kernel_writes_what_the_reference_writes(
    head_dim: int, block_size: int, dtype: torch.dtype, many_tokens: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bit by bit, for scales that need no rounding (the interpreter's is wrong); tokens without a place are not there,
    and all else stays."""
    monkeypatch.setattr(pagebus.kernels.layers.rotary_kv_write, "MANY_TOKENS", many_tokens)
    blocks = make_blocks(block_size, head_dim, device)
    qkv = torch.randint(-126, 127, (6, Q_HEADS + 2 * KV_HEADS, head_dim), device=device).float()
    qkv[..., 5] = 127.0
    sizes = 2.0 ** torch.randint(-12, 3, (*qkv.shape[:2], 1), device=device)
    sizes[0, Q_HEADS] = 0.0
    qkv = (qkv * sizes + (torch.rand_like(qkv) - 0.5) * 0.9 * sizes * (qkv < 127)).to(dtype)  # is rounded
    mapping = torch.tensor([3 * block_size + 7, -1, 0, 9 * block_size - 1, -1, 5], device=device)
    expected = run(rotary_kv_write_reference, blocks, head_dim, qkv, mapping)
    assert not torch.equal(expected, blocks)
    assert torch.equal(run(rotary_kv_write, blocks, head_dim, qkv, mapping), expected)
    assert torch.equal(run(rotary_kv_write_invariant, blocks, head_dim, qkv, mapping), expected)
