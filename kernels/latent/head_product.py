"""Each head's vector times the head's own matrix: what absorbs the expansion of latents into queries and results."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

FEW = 64
"""Tokens up to which a tile has 16 of them, so that many programs read the matrices."""


@triton.jit(do_not_specialize=["num_tokens"])
def _head_product_kernel(
    x_ptr,  # [T, H, IN]
    weight_ptr,  # [H, IN, OUT]
    out_ptr,  # [T, H, OUT]
    num_tokens,
    stride_xt,
    stride_xh,
    stride_wh,
    stride_wi,
    stride_wo,
    stride_ot,
    stride_oh,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums run over IN in one order, whatever the number of tokens is."""
    head = tl.program_id(1)
    token = (tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)[:, None]
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[None, :]
    inner = tl.arange(0, BLOCK_IN)
    exists = token < num_tokens
    weight_ptr += head * stride_wh + inner[:, None] * stride_wi + column * stride_wo
    x_ptr += token * stride_xt + head * stride_xh + inner[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_OUT], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        live = inner < IN - start
        x = tl.load(x_ptr + start, mask=exists & live[None, :], other=0.0)
        weight = tl.load(weight_ptr + start * stride_wi, mask=live[:, None] & (column < OUT), other=0.0)
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    out = out_ptr + token * stride_ot + head * stride_oh + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=exists & (column < OUT))


def head_product(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, *, invariant: bool = False
) -> torch.Tensor:
    """x [T, H, A] times each head's matrix, weight [H, A, B] -> [T, H, B], or into ``out``. The last dimension of x and
    out is contiguous, and one of the last two of ``weight``. ``invariant``: a token has the same bits for any T."""
    (num_tokens, heads, size), width = x.shape, weight.shape[2]
    out = x.new_empty(num_tokens, heads, width) if out is None else out
    assert weight.shape[:2] == (heads, size)
    assert out.shape == (num_tokens, heads, width)
    assert x.stride(2) == out.stride(2) == 1
    if not num_tokens:
        return out
    few = num_tokens <= FEW and not invariant
    narrow = few or x.element_size() > 2
    block_tokens, block_out = (16 if narrow else 64), min(64 if narrow else 128, max(16, next_power_of_2(width)))
    _head_product_kernel[(-(-width // block_out), heads, -(-num_tokens // block_tokens))](
        x, weight, out, num_tokens, *x.stride()[:2], *weight.stride(), *out.stride()[:2], IN=size, OUT=width,
        BLOCK_TOKENS=block_tokens, BLOCK_OUT=block_out, BLOCK_IN=min(64, max(16, next_power_of_2(size))),
        PRECISION="ieee" if x.element_size() > 2 else "tf32", **pdl(x.device), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def head_product_invariant(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`head_product`, of each token alone."""
    return head_product(x, weight, out, invariant=True)
