"""Times products with words of 4 bits of more than a few tokens: `python -m tests.gpu.quantized.bench_words`.

Each launch shape of the kernel that widens words, the one that is chosen, and the library's bfloat16, in
microseconds; the largest error, relative to the product with the dequantized weight. ``--prompts``: how long
dequantizing takes, and products of prompts by each way, for hundredths of a second each, because power bounds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import target_of
from pagebus.kernels.linear.activation import activation_mul
from pagebus.kernels.linear.linear import gated_linear, linear
from pagebus.kernels.linear.shapes import LinearKernel, Product
from pagebus.kernels.linear.tuning.timing import Compilers, graph_microseconds
from pagebus.kernels.quantized.choice import choose_quantized
from pagebus.kernels.quantized.coding import coded_of
from pagebus.kernels.quantized.dequantize import dequantize, dequantize_numbers
from pagebus.kernels.quantized.layouts import W4Words
from pagebus.kernels.quantized.library import library_product, prompt_product
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig
from tests.gpu.quantized.bench_quantized import CUDA, LAYOUTS, Bench

SHAPES = ("plain:6144x4096", "partial:4096x4096", "gated:28672x4096", "partial:4096x14336")
TILES = ((128, 256), (256, 128), (128, 128), (256, 64), (128, 64), (128, 32))
"""Rows and tokens that are tried."""
SUSTAINED_US = 5e4


def configs(product: Product, tokens: int) -> list[WideningConfig]:
    """What is tried: tiles of fewer than four times as many tokens."""
    parts = (1, 2, 4, 8) if product.form == "partial" else (1,)
    found = [WideningConfig(width, split, rows) for rows, width in TILES for split in parts]
    found = [each for each in found if each.splits < 8 or each.programs > 1]
    found = [each for each in found if product.form != "partial" or each.splits > 2 or each.tokens > 128]
    return [each for each in found if each.fits(product.inputs) and tokens / 4 <= each.tokens < 2 * max(tokens, 16)]


class Job:
    """A kernel to be compiled beforehand."""

    def __init__(self, layout: str, product: Product, tokens: int, config: WideningConfig) -> None:
        self.name, self.kernel = f"{product.name} {config}", (product.form, config)
        self._given = layout, product, tokens, config

    def launch(self) -> None:
        layout, product, tokens, config = self._given
        bench = Bench(product, LAYOUTS[layout], 0)
        bench.call(config, tokens, bench.weights[0])


def name_of(config: object) -> str:
    if isinstance(config, WideningConfig):
        return f"{config.rows}x{config.tokens} {config.splits}"
    return "library" if config is None else "chosen tiles"


def line(bench: Bench, tokens: int) -> str:
    product, kind = bench.product, bench.kind
    assert kind is not None
    chosen = choose_quantized(product.form, tokens, product.rows, product.inputs, kind, torch.bfloat16, target_of(CUDA))
    x, weight = bench.x[:tokens], bench.weights[0]
    assert isinstance(weight, W4Words)
    dense = F.linear(x, weight.dense(torch.bfloat16))
    expected = (activation_mul(dense) if product.form == "gated" else dense).float()
    times: dict[str, float] = {}
    worst = 0.0
    for config in {chosen.config: None} | dict.fromkeys(configs(product, tokens)):
        try:
            found = bench.call(config, tokens, weight)
            assert isinstance(found, torch.Tensor)
            if product.form == "gated" and config is None:
                found = activation_mul(found)
            sums = found.float() if found.dim() == 2 else found.sum(0)
            error = float((sums - expected).norm() / expected.norm())
            worst = max(worst, error)
            times[name_of(config) + (f" WRONG {error:.0e}" if error > 1e-2 else "")] = bench.microseconds(
                config, tokens
            )
        except Exception as error:
            print(f"  {config}: {str(error)[:200]}", flush=True)
    ways = "; ".join(f"{name}: {us:.1f}" for name, us in sorted(times.items(), key=lambda item: item[1]))
    return f"{product.name.rpartition(':')[0]} {tokens} chosen {name_of(chosen.config)} | {ways} | error {worst:.1e}"


def dense_times(product: Product, counts: list[int]) -> str:
    count = max(2, 400_000_000 // (2 * product.rows * product.inputs))
    weights = [torch.randn(product.rows, product.inputs, device=CUDA).bfloat16() * 0.02 for _ in range(count)]
    x = torch.randn(max(counts), product.inputs, device=CUDA).bfloat16()
    times = []
    for tokens in counts:
        us = graph_microseconds([partial(F.linear, x[:tokens], weight) for weight in weights] * 2)
        times.append(f"{tokens}: {us:.1f}")
    return f"{product.name} bfloat16 by the library | {'; '.join(times)}"


def sustained(call: Callable[[], object]) -> float:
    """Microseconds of a call among as many as take some hundredths of a second."""
    once = graph_microseconds([call] * 4)
    return graph_microseconds([call] * max(4, int(SUSTAINED_US / once)), 3)


def prompts(product: Product, layout: str, tokens: int) -> None:
    weight, x = (
        LAYOUTS[layout](product.rows, product.inputs),
        torch.randn(tokens, product.inputs, device=CUDA).bfloat16(),
    )
    assert isinstance(weight, W4Words)
    out, gated = torch.empty(weight.shape, device=CUDA, dtype=torch.bfloat16), product.form == "gated"
    coded = coded_of(weight)
    assert coded is not None
    dense, act = weight.dense(torch.bfloat16), activation_mul if gated else lambda each: each
    ways: dict[str, Callable[[], object]] = {
        "dequantize, as it was": lambda: dequantize_numbers(weight, out, 0),
        "dequantize": lambda: dequantize(weight, out, 0),
        "bfloat16": lambda: act(F.linear(x, dense)),
        "library": lambda: act(library_product(LinearKernel.DEQUANTIZED, x, weight, None, None)),
    }
    if gated:
        ways["bfloat16, ours"] = lambda: gated_linear(x, dense, None, config=PromptConfig())
        ways["ours"] = lambda: prompt_product(x, weight, None, "silu", PromptConfig())
    for rows, width in ((256, 128), (128, 256)):
        config = WideningConfig(width, 1, rows)
        ways[f"{rows}x{width}"] = partial(gated_linear if gated else linear, x, coded, None, config=config)
    times = {}
    for name, call in ways.items():
        times[name] = sustained(call)
    print(
        f"{product.name} {tokens} prompts | {'; '.join(f'{name}: {us:.1f}' for name, us in times.items())}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="int4")
    parser.add_argument("--products", nargs="+", type=Product.parse, default=[Product.parse(name) for name in SHAPES])
    parser.add_argument("--tokens", nargs="*", type=int, default=[32, 64, 128, 192, 256, 512, 1024])
    parser.add_argument("--prompts", nargs="*", type=int, default=[])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    jobs = [
        Job(arguments.layout, product, tokens, config)
        for product in arguments.products for tokens in arguments.tokens for config in configs(product, tokens)
    ]  # fmt: skip
    with Compilers() as compilers:
        for wrong in compilers.compile(jobs):
            print(wrong, flush=True)
    for product in arguments.products:
        if arguments.tokens:
            bench = Bench(product, LAYOUTS[arguments.layout])
            bench.product = product._replace(layout="" if bench.kind is None else bench.kind.name)
            for tokens in arguments.tokens:
                print(line(bench, tokens), flush=True)
            print(dense_times(product, arguments.tokens), flush=True)
        for tokens in arguments.prompts:
            prompts(product, arguments.layout, tokens)


if __name__ == "__main__":
    main()
