"""Chooses what multiplies by quantized experts: by a rule, until times on GPUs say better.

Pairs are left as they come, or sorted into items, at the same numbers of tokens as for experts in 16 bits. Items are
tiles of tokens, at most 64 wide, or 128 on Hopper where registers suffice: launch shapes are those of dense products of
as many tokens, `pagebus.kernels.quantized.choice`, which are known not to spill. Few pairs, and items of 32, take tiles
of 32 rows, so that there are enough programs, and registers. Single pairs of words are 8 wide. On Hopper they come
through a ring where that kernel reads them, or else codes of 4 bits have deep steps, as in dense products. The two
products of a layer may have different layouts.

Sorted pairs are rounded to 8 bits where the checkpoint was made for that and the GPU multiplies them: tiles have 64
rows then, and both operands come from shared memory. Pairs as they come stay in 16 bits.
"""

from __future__ import annotations

from functools import cache

import torch

from pagebus.kernels.coded.weights import WORD_TILE, Code
from pagebus.kernels.common.target import HOPPER, Target
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.moe.choice import ExpertsChoice, choose_experts
from pagebus.kernels.moe.coded import CodedConfig
from pagebus.kernels.moe.launch.shapes import ExpertsKernel, Shape, item_size, leaves_unsorted
from pagebus.kernels.quantized.choice import invariant_config, rounds_to
from pagebus.kernels.quantized.coding import Kind
from pagebus.kernels.quantized.word_choice import DEEP, deep_of, few_tile
from pagebus.kernels.specialized.hopper_few import MOST_INPUTS, ROWS, WARPS, FewConfig

Kinds = tuple[Kind | None, Kind | None]
"""Of both products of experts; None: no kernel reads it."""
MOST_OF_AN_ITEM = 64
"""Pairs, where registers would not suffice for more."""


def choose_quantized_experts(
    num_tokens: int, shape: Shape, kinds: Kinds, dtype: torch.dtype, target: Target | None, *, invariant: bool = False
) -> ExpertsChoice:
    """The kernels for this many tokens, and why. Where none reads the layout, all of a layer's experts are dequantized,
    and ``config`` is for dense ones."""
    if target is None:
        return ExpertsChoice(ExpertsKernel.TORCH, "experts", None, "a CPU")
    gate_up, down = kinds
    if gate_up is None or down is None or dtype.itemsize > 2:
        dense = choose_experts(num_tokens, shape, dtype, target, invariant=invariant)
        why = "not in 16 bits" if dtype.itemsize > 2 else "no kernel reads this layout"
        why = f"{why}: a layer is dequantized at a time"
        return ExpertsChoice(ExpertsKernel.DEQUANTIZED, dense.form, dense.config, why)
    if invariant:
        config = coded_invariant(num_tokens, shape, gate_up, down)
        why = "--deterministic: one order of sums for any number of tokens"
    else:
        gate_up, down = (kind._replace(rounded=rounds_to(kind, dtype, target)) for kind in (gate_up, down))
        config = choose_coded(num_tokens, shape, gate_up, down, dtype, target)
        why = "a rule: quantized experts were not measured yet"
    return ExpertsChoice(ExpertsKernel.CODED, "experts", config, why)


def choose_coded(
    num_tokens: int, shape: Shape, gate_up: Kind, down: Kind, dtype: torch.dtype, target: Target
) -> CodedConfig:
    """The launch shapes for this many tokens."""
    pairs = num_tokens * shape.top_k
    if leaves_unsorted(pairs, shape):
        width = 8 if gate_up.code.in_words and down.code.in_words else 16
        few = (
            _ring(gate_up, shape.hidden, shape.width, dtype, target) or _rows_of_few(gate_up, shape.hidden, width),
            _ring(down, shape.width, shape.hidden, dtype, target) or _rows_of_few(down, shape.width, width),
        )
        return CodedConfig(*few, ordered=False)
    return _ordered(item_size(-(-pairs // shape.experts)), gate_up, down, target)


def coded_invariant(num_tokens: int, shape: Shape, gate_up: Kind, down: Kind) -> CodedConfig:
    """The same with which a token's result does not depend on others: only the width of items differs."""
    size = item_size(-(-num_tokens * shape.top_k // shape.experts))
    tokens = min(invariant_config(size, kind).tokens for kind in (gate_up, down))
    return CodedConfig(invariant_config(tokens, gate_up), invariant_config(tokens, down), ordered=True)


def _ring(kind: Kind, inputs: int, columns: int, dtype: torch.dtype, target: Target) -> FewConfig | None:
    """Of the kernel whose words come through a ring; None: it does not compute the product."""
    whole_numbers, floats = kind.code == Code.WORDS, kind.code == Code.E2M1 and dtype == torch.bfloat16
    reads = not kind.lows and ((whole_numbers and kind.width == WORD_TILE) or (floats and kind.width == 32))
    config = FewConfig(8, -(-inputs // (WARPS * WORD_TILE)))
    whole = columns % ROWS == 0 and 8 * config.steps <= MOST_INPUTS and config.fits(inputs)
    return config if target.capability == HOPPER and reads and whole else None


def _rows_of_few(kind: Kind, columns: int, width: int) -> TileConfig:
    if kind.code == Code.WORDS and not kind.lows:
        return few_tile(32, width, deep_of(columns, DEEP))
    return TileConfig(32, width, kind.depth, 4, 2)


@cache
def _ordered(tokens: int, gate_up: Kind, down: Kind, target: Target) -> CodedConfig:
    wide = target.capability == HOPPER and not (gate_up.small or down.small)
    tokens = tokens if wide else min(MOST_OF_AN_ITEM, tokens)
    return CodedConfig(_tile_of(tokens, gate_up, target), _tile_of(tokens, down, target), ordered=True)


def _tile_of(tokens: int, kind: Kind, target: Target) -> TileConfig:
    """For items of this many pairs; of a kind that is ``rounded``, they are."""
    if kind.rounded:
        return TileConfig(64, tokens, kind.depth, 3 if target.small_memory else 4, 4, rounded=True)
    if tokens > MOST_OF_AN_ITEM:
        return TileConfig(128, tokens, kind.depth, 3, 8)
    if tokens == MOST_OF_AN_ITEM:
        return TileConfig(64, tokens, kind.depth, 2 if target.small_memory else 3, 4)
    return TileConfig(64 if tokens < 32 else 32, tokens, kind.depth, 4, 2)
