"""Keys and values in int8: whole numbers from -127 to 127, times a scale per token and head.

A block of such a cache holds the numbers of its tokens in all layers and, behind them, their scales in bfloat16. The
scales of a key and its value are adjacent, so that one 32-bit load gets both; the scales of a head's tokens are
contiguous. Numbers are rounded by the scale as stored, so the rounding of the scale adds no error. Values are stored
with 128 added (modulo 256): as unsigned numbers they convert to the formats of tensor cores in two steps.

Attention does not dequantize. A key's scale multiplies its scores. A value's scale multiplies its weights, as a
logarithm added to the scores, so weights are at most 1 whatever the scales are.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import constant, tl, triton

MOST, PER_MOST, LEAST = 127.0, 1 / 127, 2.0**-48
"""The largest number, one over it, and the smallest scale: logarithms of scales stay far from infinity."""
LARGEST, STEP, SMALLEST_SCALE = constant(MOST), constant(PER_MOST), constant(LEAST)
ONES = constant(0x3F803F80)
"""Two scales of 1."""
FLIPS = (0, -128)
"""The masks that stored bits are combined with (exclusive or): for keys, for values."""
ROUNDING, ROUNDING_BITS = constant(12582912.0), constant(0x4B400000)
"""1.5 * 2^23: a float32 that it is added to is rounded to a whole number, which its last bits are."""
SCALE_BYTES = 4
"""Bytes of the scales of a token's key and value, per head and layer."""


def block_bytes(num_layers: int, block_size: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block."""
    return num_layers * block_size * kv_heads * (2 * head_dim + SCALE_BYTES)


def split_blocks(
    blocks: torch.Tensor, num_layers: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of ``blocks`` [N, bytes] int8: numbers [N, layers, 2, block_size, Hkv, D] and scales [layers, 2, N,
    block_size, Hkv] in bfloat16, keys' and values'."""
    block_size = blocks.shape[1] // block_bytes(num_layers, 1, kv_heads, head_dim)
    count = num_layers * 2 * block_size * kv_heads * head_dim
    numbers = blocks[:, :count].unflatten(1, (num_layers, 2, block_size, kv_heads, head_dim))
    scales = blocks[:, count:].view(torch.bfloat16).unflatten(1, (num_layers, kv_heads, block_size, 2))
    return numbers, scales.permute(1, 4, 0, 3, 2)


def check_scales(k_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """Check that a cache with one byte per number, and no other, has its scales: [2, Hkv] float32 for a float8 cache,
    [2, num_blocks, block_size, Hkv] for an int8 one, as `split_blocks` returns them."""
    num_blocks, block_size, kv_heads, _dim = k_cache.shape
    assert (kv_scales is None) == (k_cache.element_size() > 1)
    if kv_scales is None:
        return
    if k_cache.dtype == torch.int8:
        assert kv_scales.dtype == torch.bfloat16
        assert kv_scales.shape == (2, num_blocks, block_size, kv_heads)
        assert (kv_scales.stride(0), *kv_scales.stride()[2:]) == (1, 2, 2 * block_size)
        assert num_blocks == 1 or kv_scales.stride(1) == k_cache.stride(0) // 2  # one block may have any stride
        assert k_cache.stride(0) % SCALE_BYTES == 0
    else:
        assert kv_scales.shape == (2, kv_heads)
        assert kv_scales.is_contiguous()


def to_int8_reference(heads: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """heads [..., D] (part 0: of keys, 1: of values) -> numbers [..., D] int8 and scales [...] bfloat16."""
    wide = heads.float()
    scales = (wide.abs().amax(-1) * PER_MOST).clamp(min=LEAST).bfloat16()
    numbers = (wide * scales.float().reciprocal().unsqueeze(-1)).round()
    return numbers.clamp(-MOST, MOST).to(torch.int8).bitwise_xor(FLIPS[part]), scales


def from_int8_reference(numbers: torch.Tensor, scales: torch.Tensor, part: int) -> torch.Tensor:
    """What `to_int8_reference` gave -> float32."""
    return numbers.bitwise_xor(FLIPS[part]).float() * scales.float().unsqueeze(-1)


@triton.jit
def round_to_int(x):
    """float32 below 2^22 -> the nearest int32, of two the even one."""
    return (x + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def quantize_halves(first, second):
    """Heads given by their halves [H, D / 2] -> the same as whole numbers in int32, and scales [H] in bfloat16."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    scale = tl.maximum(largest * STEP, SMALLEST_SCALE).to(tl.bfloat16)
    per_scale = tl.div_rn(1.0, scale.to(tl.float32))[:, None]
    first = tl.clamp(first * per_scale, -LARGEST, LARGEST)
    second = tl.clamp(second * per_scale, -LARGEST, LARGEST)
    return round_to_int(first), round_to_int(second), scale


@triton.jit
def split_queries(q):
    """q [H, D] as sums of two int8: q = (254 * high + low) * scale, scale [H]. Both products with keys are exact."""
    q = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), axis=1), 1e-30)
    q *= (1.0 / largest * LARGEST)[:, None]
    high = round_to_int(q)
    low = round_to_int((q - high.to(tl.float32)) * 254.0)
    return high.to(tl.int8), low.to(tl.int8), largest * (1.0 / 254.0 / 127.0)


@triton.jit
def token_scales(words, NATIVE: tl.constexpr):
    """What 32 bits of scales say: the key's, the logarithm (of base 2) of the value's, and one over the value's.

    NATIVE: by a GPU's instruction, of which nothing but speed depends: weights are summed up by the same logarithm.
    """
    k_scale, v_scale = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    if NATIVE:
        v_log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [v_scale], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        v_log = tl.log2(v_scale)
    return k_scale, v_log, tl.exp2(-v_log)


_CODE = """{{
    .reg .b32 unsigned, lower, upper, bias;
    {} unsigned, $2{};
    prmt.b32 lower, unsigned, 0x64646464, {};
    prmt.b32 upper, unsigned, 0x64646464, {};
    mov.b32 bias, 0x64806480;
    sub.f16x2 $0, lower, bias;
    sub.f16x2 $1, upper, bias;
}}"""
_KEYS = constant(_CODE.format("xor.b32", ", 0x80808080", "0x4140", "0x4342"))
_VALUES = constant(_CODE.format("mov.b32", "", "0x4140", "0x4342"))
"""Of four bytes. Behind a byte, 0x64 makes a float16: 1024 more than it, and so 1152 more than what was
stored. float16 has all these numbers."""


@triton.jit
def unpack(x, FLIP: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Stored numbers in another format, where they are exact. NATIVE: by instructions of a GPU, for float16."""
    if NATIVE and tl.float16 == TYPE:
        CODE: tl.constexpr = _VALUES if FLIP else _KEYS
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    return (x ^ FLIP).to(TYPE)


_EVEN_ODD = constant("prmt.b32 $0, $2, 0, 0x4240; prmt.b32 $1, $2, 0, 0x4341;")
UNIT = 2.0**-24
VALUE_BIAS, PER_UNIT = constant(128 * UNIT), constant(1 / UNIT)
"""The smallest float16 is 2^-24, and its multiples up to 1023 have themselves as bits."""


@triton.jit
def unpack_value_pairs(x, NATIVE: tl.constexpr):
    """Two stored values lie in each int16: the lower ones and the upper ones as float16, (value + 128) * 2^-24.

    That takes one instruction for two numbers, as nothing but their place in a register changes.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            _EVEN_ODD, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    lower, upper = (x & 0xFF).to(tl.int16), ((x >> 8) & 0xFF).to(tl.int16)
    return lower.to(tl.float16, bitcast=True), upper.to(tl.float16, bitcast=True)


@triton.jit
def value_pairs(x, TYPE: tl.constexpr):
    """Convert to another format and remove the added 128."""
    return ((x & 0xFF) - 128).to(TYPE), (((x >> 8) & 0xFF) - 128).to(TYPE)
