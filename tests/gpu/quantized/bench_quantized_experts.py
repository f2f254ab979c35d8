"""Times a layer's experts in quantized layouts: `python -m tests.gpu.quantized.bench_quantized_experts [--try]`.

As `tests.gpu.bench.bench_moe` does for 16 bits: graphs of several layers whose weights come from memory, all experts
equally likely. The floor is the bytes of the experts that were chosen at 4.30 TB/s, or the products at 790 TFLOP/s.
``--try`` times other launch shapes too, one product at a time, and prints the fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.moe.coded import CodedConfig, coded_experts
from pagebus.kernels.quantized.coding import experts_kind_of
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts
from pagebus.kernels.quantized.experts import QuantizedExperts, coded_layer, moe_experts
from pagebus.kernels.quantized.layouts import num_bytes
from tests.gpu.bench.bench_moe import TOKENS, Bench
from tests.gpu.moe_cases import COPY_BYTES_PER_US, CUDA, MODELS, OPERATIONS_PER_US, Model
from tests.helpers.quantized.random_layouts import LAYOUTS, stacked, w8_blocks

ROUNDED_BLOCKS = "fp8 blocks of 128x128, rounded"
MADE = LAYOUTS | {
    ROUNDED_BLOCKS: lambda n, k, device: replace(w8_blocks(n, k, torch.float8_e4m3fn, (128, 128), device), rounded=True)
}
CASES = (
    ("qwen3-30b-a3b", ROUNDED_BLOCKS), ("qwen3-30b-a3b", "fp8 blocks of 128x128"), ("gpt-oss-20b", "mxfp4"),
    ("qwen3-30b-a3b", "int4 groups of 128, zeros"), ("mixtral-8x7b", "fp8 rows"),
)  # fmt: skip
TRIED = ((32, 2, 4), (64, 2, 4), (64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 8, 3))
ROUNDED = ((64, 4, 4), (64, 4, 3), (128, 8, 3))
"""Rows, warps and stages; the second, of pairs that are rounded."""


def make_layer(model: Model, name: str) -> QuantizedExperts:
    """Random weights."""
    shape, device = model.shape, torch.device(CUDA)
    gate_up = stacked(MADE[name], shape.experts, 2 * shape.width, shape.hidden, device)
    down = stacked(MADE[name], shape.experts, shape.hidden, shape.width, device)
    if not model.biased:
        return QuantizedExperts(gate_up, down, None, None, model.gate)
    biases = (torch.randn(each.shape[:2], device=device).bfloat16() for each in (gate_up, down))
    return QuantizedExperts(gate_up, down, *biases, model.gate)


def microseconds(bench: Bench, config: CodedConfig | None) -> float:
    """With a launch shape, or as is chosen."""
    if config is None:
        return bench.microseconds(lambda one, layer: moe_experts(one.x, one.weights, one.experts, layer))
    return bench.microseconds(
        lambda one, layer: coded_experts(one.x, one.weights, one.experts, coded_layer(layer), config)
    )


def candidates(chosen: CodedConfig) -> Iterator[CodedConfig]:
    """Others in which one of both products is as chosen, with narrower and wider items."""
    widths = {chosen.gate_up.tokens, *(size for size in (16, 32, 64, 128) if chosen.ordered)}
    tried = [each for each in TRIED if not chosen.gate_up.rounded or each in ROUNDED]
    for width, (rows, warps, stages) in combinations(sorted(widths), tried):
        gate_up, down = (replace(each, tokens=width) for each in chosen[:2])

        def other(config: TileConfig, shape: tuple[int, int, int] = (rows, warps, stages)) -> TileConfig:
            return replace(config, rows=shape[0], warps=shape[1], stages=shape[2])

        yield CodedConfig(other(gate_up), down, chosen.ordered)
        yield CodedConfig(gate_up, other(down), chosen.ordered)


def line(model: str, name: str, bench: Bench, *, try_others: bool) -> None:
    """One number of tokens."""
    layer, shape = bench.layers[0], bench.model.shape
    bytes_hit = (num_bytes(layer.gate_up) + num_bytes(layer.down)) / shape.experts * bench.hit
    floor = max(bytes_hit / COPY_BYTES_PER_US, bench.model.operations(bench.tokens) / OPERATIONS_PER_US)
    took, target = microseconds(bench, None), target_of(bench.chosen[0].x.device)
    kinds = experts_kind_of(layer.gate_up), experts_kind_of(layer.down)
    chosen = choose_quantized_experts(bench.tokens, shape, kinds, torch.bfloat16, target).config
    print(
        f"{model:16} {name:26} {bench.tokens:>6} {bench.hit:6.1f} {floor:8.1f} {took:8.1f} {floor / took:6.0%} "
        f"{chosen}",
        flush=True,
    )
    if not try_others or not isinstance(chosen, CodedConfig):
        return
    timed: list[tuple[float, CodedConfig]] = []
    for config in candidates(chosen):
        try:
            timed.append((microseconds(bench, config), config))
        except Exception as error:  # a launch shape that this GPU does not take
            print(f"  {config}: {str(error)[:80]}")
    for us, config in sorted(timed, key=lambda pair: pair[0])[:4]:
        print(f"{'':18} {us:8.1f}  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="with --layout, in place of the five cases")
    parser.add_argument("--layout", choices=MADE)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--try", action="store_true", dest="try_others", help="time other launch shapes")
    options = parser.parse_args()
    torch.manual_seed(0)
    for model, name in ((options.model, options.layout),) if options.model and options.layout else CASES:
        layers = [make_layer(MODELS[model], name) for _ in range(2)]
        for tokens in options.tokens:
            line(model, name, Bench(MODELS[model], tokens, layers), try_others=options.try_others)
        del layers


if __name__ == "__main__":
    main()
