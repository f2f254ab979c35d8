"""Gated product of a fused gate_up projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.kernels.coded.rounding import LARGEST, LEAST, RoundedTokens, round_rows, round_tokens, rounded_like
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

GATES = {"silu": 1, "gelu_tanh": 2}
"""Activations of gates, by the numbers that kernels know them by; 0 is no gate."""


MOST_OF_A_PROGRAM = 32768
"""Numbers of a token that one program rounds."""


def activation_mul_reference(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:], ``act`` one of `GATES`. x [T, 2I] (gate | up) -> [T, I]; the activation is rounded to
    x's dtype first."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if GATES[act] == 1 else F.gelu(gate, approximate="tanh")) * up


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """`activation_mul_reference` of SiLU."""
    return activation_mul_reference(x)


@triton.jit
def activate(x, GATED: tl.constexpr):
    """The activation of float32 x: SiLU, or GELU by its tanh approximation, which is x times a sigmoid too."""
    power = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GATED == 2 else x
    return x / (1.0 + tl.exp(-power))


@triton.jit(do_not_specialize=["num_tokens"])
def _activation_mul_kernel(
    x_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    stride_x,
    num_tokens,
    SIZE: tl.constexpr,  # I
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,  # one of GATES
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + columns, mask=mask, other=0.0)
    activated = activate(gate, GATED).to(up.dtype).to(tl.float32)
    product = activated * up.to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`activation_mul` of SiLU."""
    return activation_mul(x)


def activation_mul(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:], ``act`` one of `GATES`. x [T, 2I] (gate | up), contiguous rows -> [T, I]."""
    assert x.dim() == 2
    assert x.shape[1] % 2 == 0
    assert x.stride(1) == 1
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(1024, next_power_of_2(size))
    grid = (num_tokens, -(-size // block))
    _activation_mul_kernel[grid](
        x, out, x.stride(0), num_tokens, SIZE=size, BLOCK=block, GATED=GATES[act], num_warps=4, **pdl(x.device)
    )  # fmt: skip
    return out


@triton.jit
def _rounded_activation_kernel(
    x_ptr,  # [T, 2I]
    out_ptr,  # [T, I] of 8 bits
    scale_ptr,  # [T]
    stride_x,
    SIZE: tl.constexpr,  # I
    BLOCK: tl.constexpr,  # I rounded up
    GATED: tl.constexpr,  # one of GATES
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # to whole numbers
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + columns, mask=mask, other=0.0)
    activated = activate(gate, GATED).to(up.dtype).to(tl.float32)
    product = (activated * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    scaled, scale = round_rows(product.reshape(1, BLOCK), LARGEST, LEAST, WHOLE)
    tl.store(out_ptr + token * SIZE + columns, scaled.reshape(BLOCK).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + token + tl.arange(0, 1), scale)


def rounded_activation_mul(x: torch.Tensor, act: str, dtype: torch.dtype) -> RoundedTokens:
    """`activation_mul` of x [T, 2I], rounded to ``dtype`` of 8 bits, in one kernel."""
    size = x.shape[1] // 2
    block = max(16, next_power_of_2(size))
    if block > MOST_OF_A_PROGRAM:
        product = activation_mul(x, act)
        return RoundedTokens(*round_tokens(product, dtype), x.dtype)
    assert x.stride(1) == 1
    out = rounded_like(x[:, :size], dtype)
    if len(x):
        _rounded_activation_kernel[(len(x),)](
            x, out.values, out.scale, x.stride(0), SIZE=size, BLOCK=block, GATED=GATES[act], LARGEST=LARGEST[dtype],
            LEAST=LEAST, WHOLE=dtype == torch.int8, num_warps=min(16, max(4, block // 512)), **pdl(x.device),
        )  # fmt: skip
    return out
