"""Launches of adapters' kernels, on tensors of no memory, that are compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from pagebus.kernels.layers.norm import NextNorm
from pagebus.kernels.linear.activation import adapted_activation_mul
from pagebus.kernels.linear.adapted import MOST_WITHIN
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.lora.behind import add_adapters
from pagebus.kernels.lora.embedding import add_to_embedding
from pagebus.kernels.lora.expand import Expansion, expand
from pagebus.kernels.lora.pages import PLACE_FIELDS, PagedTable
from pagebus.kernels.lora.plan import PRODUCTS, AdapterPlan, Arrivals, most_segments, plan_adapters, segment_tokens
from pagebus.kernels.lora.segments import Segments
from pagebus.kernels.lora.shrink import num_parts, shrink
from pagebus.kernels.lora.within import within
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.adapted.experts import ExpertTables, adapted_experts
from pagebus.kernels.moe.launch.shapes import Shape
from pagebus.kernels.moe.weights import ExpertWeights
from tests.kernels.moe.launches import GPT_OSS, QWEN3

QKV, DOWN = (4096, (4096, 1024, 1024)), (14336, (4096,))
FORMS: dict[Callable[..., object], str] = {linear: "plain", gated_linear: "gated", partial_linear: "partial"}


def adapters() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case and its launch: q, k and v, and the product with most inputs, of decodes and of prompts."""
    for tokens in (1, 64, 2048):
        for inputs, widths in (QKV, DOWN):
            for pages in (1, 40):
                case = f"bf16 adapters of {inputs} inputs and {len(widths)} modules in {pages} pages, {tokens} tokens"
                yield case, partial(_both_halves, tokens, inputs, widths, pages)
    for tokens, config in (
        (1, TileConfig(48, 16, 256, 3, 4)), (32, TileConfig(48, 32, 128, 6, 4)), (1, VectorConfig(8, 512, 4)),
    ):  # fmt: skip
        yield f"bf16 adapted linear of {tokens} tokens, {config}", partial(_within, linear, tokens, *QKV, config)
    for tokens, config in (
        (1, TileConfig(112, 8, 128, 4, 4)), (16, TileConfig(112, 16, 128, 4, 4)), (32, TileConfig(64, 32, 128, 4, 4)),
        (64, TileConfig(112, 64, 128, 4, 8)), (1, VectorConfig(4, 1024, 4, 2)),
    ):  # fmt: skip
        case = f"bf16 adapted gated linear of {tokens} tokens, {config}"
        yield case, partial(_within, gated_linear, tokens, 4096, (14336, 14336), config)
    for tokens, config in ((32, TileConfig(64, 32, 256, 3, 4, 2, tma=True)),
                           (64, TileConfig(64, 64, 256, 3, 4, 2, tma=True))):  # fmt: skip
        case = f"bf16 adapted partial linear of {tokens} tokens, {config}"
        yield case, partial(_within, partial_linear, tokens, *DOWN, config)
    config = TileConfig(64, 16, 256, 4, 4, 2, tma=True)
    yield f"bf16 adapted residual linear of 16 tokens, {config}", partial(_into_residual, 16, *DOWN, config)
    yield "bf16 adapters in activations, 256 tokens", partial(_activated, 256, 14336)
    yield "fp32 adapters of 64 tokens", partial(_both_halves, 64, *QKV, 1, torch.float32)
    for tokens in (64, 2048):
        yield f"bf16 adapters with biases, {tokens} tokens", partial(_biased, tokens)
    for shape, gate in ((QWEN3, Gate()), (GPT_OSS, Gate(GateKind.SWIGLU_CLAMPED))):
        for tokens in (16, 4096):
            yield f"bf16 adapted experts of {shape}, {tokens} tokens, invariant", partial(_experts, shape, gate, tokens)
    yield "bf16 adapters of a head, 64 tokens", partial(_behind, 64, 4096, (128256,))
    yield "bf16 adapters of an embedding, 64 tokens", partial(_embedded, 64, 4096)
    yield "plan of adapters", partial(plan_adapters, meta_ints(256), meta_ints(257), 2048, 66, 64)


def _within(call: Callable[..., object], tokens: int, inputs: int, widths: tuple[int, ...], config: Config) -> None:
    x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (tokens, sum(widths)))
    call(x, weight, config=config, expansion=_expansion(x, widths, config, FORMS[call]))


def _activated(tokens: int, width: int) -> None:
    plan, table = meta_plan(tokens), meta_table((width, width), 1)
    s = torch.empty(num_parts(4096, torch.bfloat16, plan.tokens), tokens, 2 * table.largest, device="meta")
    adapted_activation_mul(s, table, plan, torch.empty(tokens, 2 * width, dtype=torch.bfloat16, device="meta"))


def _into_residual(tokens: int, inputs: int, widths: tuple[int, ...], config: Config) -> None:
    x, weight, residual = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((tokens, inputs), (sum(widths), inputs), (tokens, sum(widths)))
    )
    norm = NextNorm(residual[0], 1e-5, meta_ints(sum(widths)))
    residual_linear(x, weight, None, residual, norm, config, _expansion(x, widths, config, "residual"))


def _expansion(x: torch.Tensor, widths: tuple[int, ...], config: Config, form: str) -> Expansion:
    """Of fewest tokens tiles make the first half as well."""
    plan, table = meta_plan(len(x)), meta_table(widths, 40)
    if isinstance(config, TileConfig) and len(x) <= MOST_WITHIN[form]:
        table = meta_table(widths, 1)
        expansion = within(x, table, plan)
        assert expansion is not None
        return expansion
    parts = num_parts(x.shape[1], x.dtype, plan.tokens)
    return Expansion(torch.empty(parts, len(x), len(widths) * table.largest, device="meta"), table, plan)


def meta_ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def meta_table(
    widths: tuple[int, ...], pages: int, dtype: torch.dtype = torch.bfloat16, places: int = 64
) -> PagedTable:
    """Adapters of rank 64 at most."""
    memory, starts = (torch.empty(places, pages, dtype=each, device="meta") for each in (dtype, torch.int64))
    scales = torch.empty(places, len(widths), device="meta")
    return PagedTable(memory, starts, meta_ints(places, PLACE_FIELDS), scales, widths, 64, 1 << 20)


def meta_plan(tokens: int) -> AdapterPlan:
    size = segment_tokens(tokens)
    columns = (meta_ints(most_segments(tokens, 66, size)) for _ in range(3))
    return AdapterPlan(Segments(*columns, meta_ints(1)), meta_ints(tokens), size, Arrivals(meta_ints(PRODUCTS)))


def _biased(tokens: int) -> None:
    table = replace(meta_table((4096,), 1), constants=True)
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
    shrink(x, table, meta_plan(tokens))


def _behind(tokens: int, inputs: int, widths: tuple[int, ...]) -> None:
    y = torch.empty(tokens, sum(widths), dtype=torch.float32, device="meta")
    x = torch.empty(tokens, inputs, dtype=torch.bfloat16, device="meta")
    add_adapters(x, meta_table(widths, 1), meta_plan(tokens), y)


def _embedded(tokens: int, hidden: int) -> None:
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    add_to_embedding(meta_ints(tokens), meta_table((hidden,), 1), meta_plan(tokens), y)


def _experts(shape: Shape, gate: Gate, tokens: int) -> None:
    """64 places of rank 16."""
    count, top_k, hidden, width = shape
    sizes = (tokens, hidden), (count, 2 * width, hidden), (count, hidden, width), (count, 2 * width), (count, hidden)
    x, *weights = (torch.empty(each, dtype=torch.bfloat16, device="meta") for each in sizes)
    tables = ExpertTables(*(meta_table(widths, 1, places=64 * count) for widths in ((width, width), (hidden,))))
    weighing, chosen = torch.empty(tokens, top_k, device="meta"), meta_ints(tokens, top_k)
    adapted_experts(x, weighing, chosen, ExpertWeights(*weights, gate), tables, meta_ints(tokens))


def _both_halves(
    tokens: int, inputs: int, widths: tuple[int, ...], pages: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    table, plan = meta_table(widths, pages, dtype), meta_plan(tokens)
    s = shrink(torch.empty(tokens, inputs, dtype=dtype, device="meta"), table, plan)
    expand(s, table, plan, torch.empty(tokens, sum(widths), dtype=dtype, device="meta"))
