"""Launches of products with quantized weights, on tensors of no memory, compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import torch

from pagebus.kernels.coded.rounding import round_tokens, scale_sums
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.activation import rounded_activation_mul
from pagebus.kernels.linear.linear import gated_linear as gated_coded
from pagebus.kernels.linear.linear import linear as linear_coded
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.quantized.choice import LEAST_OF_E4M3
from pagebus.kernels.quantized.coding import coded_of
from pagebus.kernels.quantized.dequantize import dequantize, dequantize_numbers
from pagebus.kernels.quantized.experts import QuantizedExperts, moe_experts
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows
from pagebus.kernels.quantized.products import gated_linear, linear_invariant, partial_linear
from pagebus.kernels.quantized.words import num_words
from pagebus.kernels.specialized.hopper_few import FewConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig
from pagebus.kernels.specialized.split_sums import add_splits

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(dtype: torch.dtype, rows: int, columns: int, *, rounded: bool = False) -> W8Rows:
    return W8Rows(_meta(rows, columns, dtype=dtype), _meta(rows), rounded)


def _blocks(dtype: torch.dtype, block: tuple[int, int], zeros: bool, rows: int, columns: int) -> W8Blocks:
    shape = rows // block[0], columns // block[1]
    return W8Blocks(_meta(rows, columns, dtype=dtype), _meta(*shape), block, _meta(*shape) if zeros else None)


def w8_rows(dtype: torch.dtype, rows: int, columns: int) -> W8Rows:
    """Rows whose tokens may be rounded."""
    return _rows(dtype, rows, columns, rounded=True)


def rounded_blocks(rows: int, columns: int) -> W8Blocks:
    """The same of blocks."""
    return replace(_blocks(E4M3, (128, 128), False, rows, columns), rounded=True)


def _words(group: int, zeros: bool, rows: int, columns: int) -> W4Words:
    shape = -(-columns // (group or columns)), rows
    zero = _meta(*shape, dtype=torch.uint8) if zeros else None
    words = _meta(rows, num_words(columns), dtype=torch.int32)
    return W4Words(words, _meta(*shape), columns, group or columns, zero)


def floats(group: int, scales: torch.dtype, rows: int, columns: int) -> W4Words:
    """Words of floats, or of places in a table."""
    plain, table = _words(group, False, rows, columns), _meta(16)
    whole = _meta(rows) if scales == E4M3 else None
    scale = plain.scale.to(scales)
    return replace(plain, scale=scale, whole=whole, table=table, e2m1=scales != torch.float32)


def _with_lows(plain: W8Blocks | W4Words) -> Layout:
    return replace(plain, low=_meta(*plain.scale.shape))


KINDS: dict[str, Callable[[int, int], Layout]] = {
    "fp8": partial(_rows, E4M3),
    "fp8 128x128": partial(_blocks, E4M3, (128, 128), False),
    "int4 128 zeros": partial(_words, 128, True),
    "int4 32": partial(_words, 32, False),
    "int8": partial(_rows, INT8),
    "int4 128": partial(_words, 128, False),
    "int8 128 zeros": partial(_blocks, INT8, (1, 128), True),
    "int4": partial(_words, 0, False),
}
QWEN3, GPT_OSS = (128, 8, 2048, 768), (32, 4, 2880, 2880)
EXPERTS: dict[str, tuple[Callable[[int, int], Layout], tuple[int, ...], int]] = {
    "fp8 128x128": (KINDS["fp8 128x128"], QWEN3, 4096),
    "mxfp4": (partial(floats, 32, torch.uint8), GPT_OSS, 512),
    "mxfp4 of one token": (partial(floats, 32, torch.uint8), GPT_OSS, 1),
    "rounded fp8 128x128": (rounded_blocks, QWEN3, 4096),
    "int4 128 zeros": (KINDS["int4 128 zeros"], QWEN3, 1),
    "nvfp4": (partial(floats, 16, E4M3), QWEN3, 16),
    "nf4": (partial(floats, 64, torch.float32), QWEN3, 1),
    "int4 32 lows": (lambda rows, columns: _with_lows(_words(32, False, rows, columns)), QWEN3, 4096),
    "int8 16 lows": (lambda rows, columns: _with_lows(_blocks(INT8, (1, 16), False, rows, columns)), QWEN3, 1),
}
"""Layouts, experts, and numbers of tokens."""
FEW_EXPERTS = ("fp8 128x128", "mxfp4", "rounded fp8 128x128")
FEW = ("fp8", "int4 128 zeros", "int4 32")
TOKENS = (1, 8, 32, 64, 256)
WIDENED = ((128, 256), (256, 128), (128, 32), (256, 64))
"""Rows and tokens of tiles whose words are widened where they are multiplied."""
FEW_CONFIGS = ((1, FewConfig(8, 4)), (16, FewConfig(16, 4)), (1, FewConfig(8, 2, 2)))
"""Tokens, and launch shapes, whose words come through a ring."""
ROUNDED_TOKENS = {E4M3: (8, 16, 32, 64, 1, 128), INT8: (32, 64, 256)}
"""Of weights whose tokens are rounded, on Hopper."""


def quantized(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case and its launch: what is chosen for numbers of tokens, and with ``--deterministic``. All kinds for
    Hopper, some for others."""
    kinds = tuple(KINDS) if arch == 90 else FEW
    for name in kinds:
        for number, tokens in enumerate(TOKENS):
            product = (partial_linear, gated_linear)[number % 2]
            yield f"quantized {name}, {tokens} tokens", partial(_launch, product, KINDS[name], tokens)
        yield f"quantized {name}, 256 tokens, invariant", partial(_launch, linear_invariant, KINDS[name], 256)
        yield f"quantized {name}, dequantized", partial(_dequantize, KINDS[name])
    yield "words dequantized by numbers", partial(_dequantize, KINDS["int4 32"], dequantize_numbers)
    for number, (rows, tokens) in enumerate(WIDENED if arch == 90 else ()):
        kind, product = KINDS[("int4 128 zeros", "int4 32")[number % 2]], (gated_coded, linear_coded)[number // 2 % 2]
        config = WideningConfig(tokens, 1, rows)
        yield f"words widened by {rows} x {tokens}", partial(_launch_coded, product, kind, config)
    for tokens, config in FEW_CONFIGS if arch == 90 else ():
        for product in (gated_coded, linear_coded):
            case = partial(_launch_coded, product, KINDS["int4 128 zeros"], config, tokens)
            yield f"{tokens} tokens through a ring by {product.__name__}, {config}", case
    for dtype in (E4M3, INT8) if arch >= LEAST_OF_E4M3 else (INT8,):
        yield f"rounded to {dtype}", partial(round_tokens, _meta(300, 4096, dtype=torch.bfloat16), dtype)
    for dtype in (E4M3, INT8) if arch >= LEAST_OF_E4M3 else (INT8,):
        make = partial(w8_rows, dtype)
        for number, tokens in enumerate(ROUNDED_TOKENS[dtype] if arch == 90 else (8, 64)):
            product = (gated_linear, partial_linear)[number % 2]
            yield f"quantized {dtype}, {tokens} rounded tokens", partial(_launch, product, make, tokens)
    for number, tokens in enumerate((8, 64, 32, 256) if arch == 90 else (64,) if arch >= LEAST_OF_E4M3 else ()):
        product = (gated_linear, partial_linear)[number % 2]
        yield f"fp8 blocks, {tokens} rounded tokens", partial(_launch, product, rounded_blocks, tokens)
    for dtype in (E4M3, INT8) if arch >= LEAST_OF_E4M3 else (INT8,):
        yield f"a norm rounded to {dtype}", partial(_norm, dtype)
        gates = _meta(300, 2 * 14336, dtype=torch.bfloat16)
        yield f"an activation rounded to {dtype}", partial(rounded_activation_mul, gates, "silu", dtype)
    sums, scale, out = _meta(300, 4096, dtype=torch.int32), _meta(4096), _meta(300, 4096, dtype=torch.bfloat16)
    parts = _meta(4, 300, 4096)
    yield "sums of parts", partial(add_splits, parts, _meta(4096, dtype=torch.bfloat16), out)
    yield "whole sums", partial(scale_sums, sums, _meta(300, 1), scale, None, out)


def quantized_experts(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """A layer of Qwen3-30B-A3B or of gpt-oss, as the number of tokens chooses its launch shapes. The layouts that dense
    products have no case of are all here: it is the same loop."""
    for name in EXPERTS if arch == 90 else FEW_EXPERTS:
        yield f"quantized experts {name}, {EXPERTS[name][2]} tokens", partial(_experts, name)


def _experts(name: str) -> None:
    make, (count, top_k, hidden, width), tokens = EXPERTS[name]
    biased = name.startswith("mxfp4")
    layer = QuantizedExperts(
        _of_experts(make(2 * width, hidden), count),
        _of_experts(make(hidden, width), count),
        _meta(count, 2 * width, dtype=torch.bfloat16) if biased else None,
        _meta(count, hidden, dtype=torch.bfloat16) if biased else None,
        Gate(GateKind.SWIGLU_CLAMPED) if biased else Gate(),
    )
    weights, chosen = _meta(tokens, top_k), _meta(tokens, top_k, dtype=torch.int32)
    moe_experts(_meta(tokens, hidden, dtype=torch.bfloat16), weights, chosen, layer)


def _of_experts(layout: Layout, count: int) -> Layout:
    found = {field.name: getattr(layout, field.name) for field in fields(layout)}
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor) and name != "table"}
    return replace(layout, **{name: _meta(count, *each.shape, dtype=each.dtype) for name, each in tensors.items()})


def _launch(product: Callable[..., object], make: Callable[[int, int], Layout], tokens: int) -> None:
    product(_meta(tokens, 4096, dtype=torch.bfloat16), make(8192, 4096))


def _norm(dtype: torch.dtype) -> None:
    x, weight = _meta(300, 4096, dtype=torch.bfloat16), _meta(4096, dtype=torch.bfloat16)
    add_rms_norm(x, x, weight, 1e-5, rounded=dtype)


def _launch_coded(
    product: Callable[..., object], make: Callable[[int, int], Layout], config: WideningConfig | FewConfig,
    tokens: int = 256,
) -> None:  # fmt: skip
    product(_meta(tokens, 4096, dtype=torch.bfloat16), coded_of(make(8192, 4096)), config=config)


def _dequantize(
    make: Callable[[int, int], Layout], by: Callable[[Layout, torch.Tensor, int], torch.Tensor] = dequantize
) -> None:
    by(make(8192, 4096), _meta(1024, 4096, dtype=torch.bfloat16), 512)
