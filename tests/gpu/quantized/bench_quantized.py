"""Times products with quantized weights: `python -m tests.gpu.quantized.bench_quantized [--try] [--write]`.

Each figure is a product alone, weights from memory, in a CUDA graph. The share is that of the speed at which an H200
copies memory, 4.30 TB/s. ``--try`` times other launch shapes than the chosen one, and the library, too, and prints the
fastest; ``--write`` does so for all buckets and puts that into the shipped table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from multiprocessing import get_context

import torch

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import target_of
from pagebus.kernels.layers.norm import NextNorm
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import merge_table, table_path
from pagebus.kernels.linear.tuning.timing import graph_microseconds
from pagebus.kernels.quantized.choice import MOST_OF_RESIDUALS, choose_quantized
from pagebus.kernels.quantized.coding import Kind, coded_of, kind_of
from pagebus.kernels.quantized.layouts import Layout, W8Rows, num_bytes
from pagebus.kernels.quantized.library import library_product
from pagebus.kernels.quantized.word_choice import few_config, word_config
from pagebus.kernels.specialized.hopper_few import MOST_TOKENS
from tests.helpers.quantized.random_layouts import TILES_ONLY, w4_words, w8_blocks, w8_rows

COPY_BYTES_PER_US, ROTATED_BYTES = 4.30e6, 200_000_000
CUDA, E4M3, INT8 = torch.device("cuda"), torch.float8_e4m3fn, torch.int8
SHAPES = (
    "plain:6144x4096", "partial:4096x4096", "residual:4096x4096", "gated:28672x4096", "partial:4096x14336",
    "residual:4096x14336",
)  # fmt: skip
VECTORS = ((2, 512, 2, 1), (4, 1024, 4, 1), (4, 1024, 4, 2), (8, 1024, 4, 1))
"""Rows, depth, warps and tiles in flight, for one token."""
ROUNDED = ((128, 4, 4), (128, 4, 8), (256, 4, 4), (128, 4, 10))
"""Depth, warps and stages of tiles of 64 rows whose tokens are rounded."""
GROUPED_FEW, GROUPED_MANY = ((64, 4, 4), (64, 4, 6), (64, 4, 8)), ((64, 4, 4), (64, 4, 3), (128, 8, 4), (128, 8, 3))
"""Rows, warps and stages of tiles of blocks whose tokens are rounded, up to 64 tokens and above."""
FEW = ((32, 2, 4), (64, 2, 4), (64, 4, 4), (128, 4, 4), (32, 2, 6), (64, 2, 6))
MANY = ((64, 4, 3), (32, 2, 3), (128, 8, 3))
"""Rows, warps and stages that are tried, for up to 32 tokens and for more."""
COMPILERS = 14


def _rounded(rows: int, columns: int, dtype: torch.dtype) -> W8Rows:
    plain = w8_rows(rows, columns, dtype, CUDA)
    return W8Rows(plain.values, plain.scale, rounded=True)


def _named(name: str, rows: int, columns: int) -> Layout:
    return TILES_ONLY[name](rows, columns, CUDA)


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "fp8": lambda n, k: _rounded(n, k, E4M3),
    "int8": lambda n, k: _rounded(n, k, INT8),
    "fp8-blocks": lambda n, k: w8_blocks(n, k, E4M3, (128, 128), CUDA),
    "fp8-blocks-rounded": lambda n, k: replace(w8_blocks(n, k, E4M3, (128, 128), CUDA), rounded=True),
    "int4": lambda n, k: w4_words(n, k, 128, CUDA, zeros=True),
    "int4-symmetric": lambda n, k: w4_words(n, k, 128, CUDA),
    "int4-32": lambda n, k: w4_words(n, k, 32, CUDA),
    **{name: partial(_named, name) for name in TILES_ONLY},
}


class Bench:
    """One product: enough weights for the L2 cache to hold none of them."""

    def __init__(
        self, product: Product, make: Callable[[int, int], Layout], rotated_bytes: int = ROTATED_BYTES
    ) -> None:
        self.product = product
        one = make(product.rows, product.inputs)
        count = min(32, max(2, -(-rotated_bytes // num_bytes(one))))
        self.weights = [one, *(make(product.rows, product.inputs) for _ in range(count - 1))]
        self.bytes, self.kind = num_bytes(one), kind_of(one)
        self.x = torch.randn(8192, product.inputs, device=CUDA).bfloat16()
        self.residual = torch.zeros(256, product.rows, device=CUDA).bfloat16()
        counters = torch.zeros(product.rows, dtype=torch.int32, device=CUDA)
        self.norm = NextNorm(torch.ones(product.rows, device=CUDA).bfloat16(), 1e-5, counters)

    def call(self, config: Config | None, tokens: int, weight: Layout) -> object:
        """The library's product is that which is chosen for many tokens."""
        x, form = self.x[:tokens], self.product.form
        if config is None:
            library = choose_quantized("plain", 5000, *weight.shape, self.kind, x.dtype, target_of(x.device))
            return library_product(library.kernel, x, weight, None, None)
        coded = coded_of(weight)
        assert coded is not None
        if form == "residual":
            return residual_linear(x, coded, None, self.residual[:tokens], self.norm, config)
        return {"gated": gated_linear, "partial": partial_linear}.get(form, linear)(x, coded, config=config)

    def microseconds(self, config: Config | None, tokens: int) -> float:
        """Of one product."""
        return graph_microseconds([partial(self.call, config, tokens, weight) for weight in self.weights] * 2)


def candidates(product: Product, kind: Kind, tokens: int) -> Iterator[Config]:
    """Launch shapes to try."""
    depth = kind.depth
    if kind.rounded and kind.width:
        yield from _of_groups(product, kind, tokens)
        return
    if tokens == 1 and depth == 128 and kind.code <= Code.WORDS and not kind.lows:
        for shape in VECTORS:
            yield VectorConfig(*shape)
    target = target_of(CUDA)
    assert target is not None
    if kind.code == Code.WORDS and tokens <= MOST_TOKENS:  # both kernels, as their rules say
        few = few_config(product, tokens, kind, target)
        yield from (config for config in (few, word_config(product, tokens, kind, target)) if config is not None)
    splits = (1, 2, 4, 8) if product.form in ("partial", "residual") else (1,)
    for width, (rows, warps, stages), parts in combinations(
        (max(16, tokens),) if tokens <= 64 else (64, 128), FEW if tokens <= 32 else MANY, splits
    ):
        config = TileConfig(rows, width, depth, stages, warps, parts)
        if config.fits(product.inputs):
            yield config
    if kind.rounded and tokens <= 128:
        width = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
        for (deep, warps, stages), parts in combinations(ROUNDED, splits):
            config = TileConfig(64, width, deep, stages, warps, parts, rounded=True)
            if config.fits(product.inputs):
                yield config


def _of_groups(product: Product, kind: Kind, tokens: int) -> Iterator[Config]:
    """Of blocks: what would be chosen if tokens were not rounded, and tiles that round them."""
    given = product.form, tokens, product.rows, product.inputs
    unrounded = choose_quantized(*given, kind._replace(rounded=False), torch.bfloat16, target_of(CUDA)).config
    if unrounded is not None:
        yield unrounded
    splits = (1, 2, 4) if product.form in ("partial", "residual") and tokens <= 256 else (1,)
    widths = (next(width for width in (16, 32, 64) if tokens <= width),) if tokens <= 64 else (64, 128)
    for width, (rows, warps, stages), parts in combinations(
        widths, GROUPED_FEW if tokens <= 64 else GROUPED_MANY, splits
    ):
        config = TileConfig(rows, width, kind.depth, stages, warps, parts, rounded=True)
        if config.fits(product.inputs):
            yield config


def compile_one(job: tuple[str, Product, int, Config]) -> None:
    """In a process of its own: launch once, so that Triton's cache has the kernel. What fails does so again later."""
    layout, product, tokens, config = job
    with suppress(Exception):
        bench = Bench(product, LAYOUTS[layout], 0)
        bench.call(config, tokens, bench.weights[0])
        torch.cuda.synchronize()


def compile_all(layouts: list[str], products: list[Product], counts: tuple[int, ...]) -> None:
    """Everything that will be tried, in several processes."""
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        for name, product in combinations(layouts, products):
            kind = kind_of(LAYOUTS[name](256, 256))
            assert kind is not None
            jobs = [
                (name, product, tokens, config) for tokens in counts for config in candidates(product, kind, tokens)
            ]
            list(pool.map(compile_one, jobs))


def line(bench: Bench, tokens: int, *, try_others: bool, all_times: bool) -> Config | None:
    """Print the chosen launch shape, and the fastest; gives that."""
    product, kind = bench.product, bench.kind
    assert kind is not None
    chosen = choose_quantized(
        product.form, tokens, product.rows, product.inputs, kind, torch.bfloat16, target_of(CUDA)
    )  # fmt: skip
    times = {chosen.config: bench.microseconds(chosen.config, tokens)}
    if try_others and (tokens <= BUCKETS[-1] or (kind.rounded and kind.width)):
        library = () if product.form == "residual" else (None,)  # which does no norm
        for config in (*library, *candidates(product, kind, tokens)):
            try:
                times[config] = bench.microseconds(config, tokens)
            except Exception as error:
                print(f"  {config}: {str(error)[:80]}")
    best = min(times, key=lambda config: times[config])
    us = times[chosen.config]
    print(
        f"{product.name:36} {tokens:>5} {chosen.kernel:12} {us:>9.2f} us {bench.bytes / us / COPY_BYTES_PER_US:>5.0%} "
        f"{2e-6 * tokens * product.rows * product.inputs / us:>6.0f} TF/s, best {times[best]:.2f} {best}",
        flush=True,
    )
    for config in sorted(times, key=lambda config: times[config]) if all_times else ():
        print(f"{times[config]:>12.2f} {config or 'library'}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["fp8", "int4", "int8", "fp8-blocks"])
    parser.add_argument("--products", nargs="+", type=Product.parse, default=[Product.parse(name) for name in SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 2048, 8192])
    parser.add_argument("--try", action="store_true", dest="try_others", help="time other launch shapes")
    parser.add_argument("--all", action="store_true", dest="all_times", help="print all times")
    parser.add_argument("--write", action="store_true", help="put the fastest into the shipped table")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    assert target is not None
    counts = tuple(BUCKETS if arguments.write else arguments.tokens)
    if arguments.try_others:
        compile_all(arguments.layouts, arguments.products, counts)
    for name, product in combinations(arguments.layouts, arguments.products):
        bench = Bench(product, LAYOUTS[name])
        bench.product = product._replace(layout="" if bench.kind is None else bench.kind.name)
        best = {
            tokens: line(bench, tokens, try_others=arguments.try_others, all_times=arguments.all_times)
            for tokens in counts
            if product.form != "residual" or tokens <= MOST_OF_RESIDUALS
        }
        if arguments.write:
            merge_table(table_path(target), bench.product, dict.fromkeys(BUCKETS) | best)


if __name__ == "__main__":
    main()
