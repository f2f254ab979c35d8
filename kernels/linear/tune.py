"""Times the kernels of `pagebus.kernels.linear.linear` on the GPU at hand and writes the table that
`pagebus.kernels.linear.dispatch` reads.

    python -m pagebus.kernels.linear.tune plain:6144x4096 partial:4096x4096 residual:4096x4096 gated:28672x4096
    wide:128256x4096

A product is named by its form and the shape of its weights, rows x inputs. Each figure is the median of graph replays
of many launches, over more weights than the L2 cache holds, with the norm that a model has before or after the product
and with what the library's product needs besides: an activation, a cast. The library keeps a place unless it is beaten
by 1%. In place of `residual`, which does half of the norm behind it, stands the `partial` product as it was chosen and
the whole norm: tune that first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import Target, target_of
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.linear.activation import silu_mul
from pagebus.kernels.linear.dispatch import BUCKETS, FORMS, Config, merge_table, table_path
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.hopper_gemm import DEPTH, TOKENS, SpecializedConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.skinny_gemm import TileConfig

ROTATED_BYTES, LEAST_LAUNCHES = 200_000_000, 3
MARGIN = 0.99
SHARED_BYTES = 227 * 1024
VECTORS = [(rows, 256 * warps, warps, ahead) for rows, warps, ahead in itertools.product((2, 4, 8), (2, 4, 8), (1, 2))]
"""Rows, depth, warps, tiles ahead."""
SPECIALIZED_ROWS = (32, 48, 64, 96, 128, 192, 224, 256)
ROWS = (32, 48, 64, 96, 112, 128, 256)
DEPTHS = ((64, 3), (64, 4), (64, 6), (128, 4), (128, 6), (128, 8), (256, 3), (256, 4))
"""With stages."""


class Product(NamedTuple):
    """``form``, and the shape of the weights [rows, inputs]."""

    form: str
    rows: int
    inputs: int

    @classmethod
    def parse(cls, text: str) -> Product:
        """``gated:28672x4096``."""
        form, _, shape = text.partition(":")
        rows, _, inputs = shape.partition("x")
        if form not in FORMS:
            raise argparse.ArgumentTypeError(f"{form} is none of {', '.join(FORMS)}")
        return cls(form, int(rows), int(inputs))


def candidates(product: Product, bucket: int, target: Target) -> list[Config]:
    """Launch shapes worth trying for ``bucket`` tokens."""
    return [*_vectors(bucket), *_tiles(product, bucket, target), *_specialized(product, bucket, target)]


def _vectors(bucket: int) -> Iterator[VectorConfig]:
    for rows, depth, warps, ahead in VECTORS:
        if bucket <= 2 and rows * bucket <= 8:
            yield VectorConfig(rows, depth, warps, ahead)


def _tiles(product: Product, bucket: int, target: Target) -> Iterator[TileConfig]:
    tma = target.capability == 90
    widths = [8, 16] if bucket <= 8 else [bucket] if bucket <= 64 else [64, 128, 256][: -(-bucket // 64)]
    splits = (1, 2, 4, 8) if product.form in ("partial", "residual") else (1,)
    for tokens, rows, (depth, stages), parts in itertools.product(widths, ROWS, DEPTHS, splits):
        config = TileConfig(rows, tokens, depth, stages, 8 if rows > 64 and tokens >= 64 else 4, parts)
        if not _worth_trying(config, product, bucket, target):
            continue
        halves = 2 if product.form == "gated" else 1
        if tma and rows in (64 * halves, 128 * halves):
            yield replace(config, tma=True)
        if rows < 256 and (not tma or (tokens <= 64 and product.form not in ("partial", "residual"))):
            yield config


def _specialized(product: Product, bucket: int, target: Target) -> Iterator[SpecializedConfig]:
    if target.capability != 90 or bucket <= 64:
        return
    for rows, splits in itertools.product(SPECIALIZED_ROWS, (1, 2, 4, 8) if product.form == "partial" else (1,)):
        config = SpecializedConfig(rows, splits)
        waves = -(-product.rows // rows) * -(-bucket // TOKENS) * splits / target.num_multiprocessors
        busy = waves / math.ceil(waves)
        if config.fits(product.inputs) and busy > 0.7 and (splits == 1 or waves <= 1):
            yield config


def _worth_trying(config: TileConfig, product: Product, bucket: int, target: Target) -> bool:
    """Whether K can be cut so, shared memory suffices, and every processor has something to do."""
    block = next_power_of_2(config.rows)
    if (block + config.tokens) * config.depth * 2 * config.stages > SHARED_BYTES or not config.fits(product.inputs):
        return False
    if (config.depth == 64 and config.tokens < 64) or (config.rows < 64 and config.tokens > 64):
        return False
    programs = -(-product.rows // config.rows) * config.splits * -(-bucket // config.tokens)
    waves = programs / target.num_multiprocessors
    return waves > 0.4 and product.inputs >= 4 * config.splits * config.depth and (config.splits == 1 or waves < 4)


def call(product: Product, config: Config | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product, by our kernel or (None) by the library."""
    if config is not None:
        if product.form == "wide":
            return linear(x, weight, None, torch.float32, config=config)
        if product.form == "partial":
            return _summed(partial_linear(x, weight, config=config))
        return (gated_linear if product.form == "gated" else linear)(x, weight, config=config)
    if product.form == "residual":
        return _summed(partial_linear(x, weight))
    if product.form == "wide":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    result = F.linear(x, weight)
    return silu_mul(result) if product.form == "gated" else result


def _summed(product: torch.Tensor | HalfNorm | None) -> torch.Tensor:
    """What was not added to a residual, as none was given."""
    assert isinstance(product, torch.Tensor)
    return product


class Bench:
    """Inputs and weights of one product."""

    def __init__(self, product: Product, rotated_bytes: int = ROTATED_BYTES) -> None:
        self.product = product
        bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        count = max(2, -(-rotated_bytes // (product.rows * product.inputs * 2)))
        self.weights = torch.empty(min(count, 32), product.rows, product.inputs, **bf16).normal_(0, 0.02)
        width = product.rows if product.form in ("partial", "residual") else product.inputs
        self.x = torch.randn(BUCKETS[-1], product.inputs, **bf16)
        self.residual = torch.zeros(BUCKETS[-1], width, **bf16)
        self.norm = torch.ones(width, **bf16)
        self.following = NextNorm(self.norm, 1e-5, torch.zeros(width, dtype=torch.int32, device="cuda"))

    def step(self, config: Config | None, tokens: int, index: int) -> None:
        """The product and the norm beside it."""
        x, residual, weight = self.x[:tokens], self.residual[:tokens], self.weights[index % len(self.weights)]
        if self.product.form == "residual" and config is not None:
            residual_linear(x, weight, None, residual, self.following, config)
        elif self.product.form in ("partial", "residual"):
            add_rms_norm(call(self.product, config, x, weight), residual, self.norm, 1e-5)
        else:
            call(self.product, config, rms_norm(x, self.norm, 1e-5), weight)

    def microseconds(self, config: Config | None, tokens: int) -> float:
        """Median time of a step, many of them captured in one graph."""
        bytes_ = self.weights[0].nbytes
        launches = max(LEAST_LAUNCHES, min(32, 8 * ROTATED_BYTES // bytes_ // 2))
        return graph_microseconds([partial(self.step, config, tokens, index) for index in range(launches)])


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 5) -> float:
    """Median time of one call, all of them captured in one graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in calls:
            one()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def compile_one(job: tuple[Product, Config, int]) -> str | None:
    """In a process of its own: launch once, so that Triton's cache has the kernel. What went wrong, if anything."""
    product, config, tokens = job
    try:
        Bench(product, 0).step(config, tokens, 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{product} {config}: {str(error)[:200]}"
    return None


def _depth(config: Config) -> int:
    return DEPTH if isinstance(config, SpecializedConfig) else config.depth


def compile_all(jobs: list[tuple[Product, Config, int]]) -> None:
    """Every kernel once, in parallel."""
    distinct = {
        (product.form, product.inputs % _depth(config), config, tokens if isinstance(config, VectorConfig) else 0): job
        for job in jobs
        for product, config, tokens in [job]
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), context) as pool:
        for failure in pool.map(compile_one, distinct.values(), chunksize=4):
            if failure:
                print(failure, flush=True)


def measure(product: Product, target: Target, buckets: Sequence[int]) -> Iterator[tuple[int, Config | None]]:
    """The fastest way for each bucket; prints a line for each."""
    bench, bytes_ = Bench(product), product.rows * product.inputs * 2
    for bucket in buckets:
        library = bench.microseconds(None, bucket)
        timed = []
        for config in candidates(product, bucket, target):
            try:
                timed.append((bench.microseconds(config, bucket), config))
            except Exception as error:  # a launch shape that this GPU does not take
                print(f"{config}: {str(error)[:100]}")
        timed.sort(key=lambda pair: pair[0])
        chosen = timed[0][1] if timed and timed[0][0] < MARGIN * library else None
        name = f"{product.form}:{product.rows}x{product.inputs}"
        best = "; ".join(f"{time:.2f} {config}" for time, config in timed[:3])
        speed = bytes_ / min([library, *(time for time, _ in timed[:1])]) / 1e6
        print(f"{name:20} {bucket:>4} library {library:8.2f} us, best {speed:.2f} TB/s | {best}", flush=True)
        yield bucket, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="+", type=Product.parse, metavar="FORM:ROWSxINPUTS")
    parser.add_argument("--buckets", nargs="+", type=int, choices=BUCKETS, default=BUCKETS, help="only these")
    parser.add_argument("--out", type=Path, help="the table that gets the results; without it, the installed one")
    arguments = parser.parse_args()
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    assert target is not None
    jobs = [
        (product, config, bucket)
        for product in arguments.products
        for bucket in arguments.buckets
        for config in candidates(product, bucket, target)
    ]
    print(f"{len(jobs)} measurements", flush=True)
    compile_all(jobs)
    path = arguments.out or table_path(target)
    for product in arguments.products:
        merge_table(path, product.form, product.rows, product.inputs, dict(measure(product, target, arguments.buckets)))


if __name__ == "__main__":
    main()
