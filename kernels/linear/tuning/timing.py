"""Times products on the GPU at hand: many in a CUDA graph, over more weights than the L2 cache holds.

Each figure is a median, with the norm that a model has before or after the product, and with what the library's product
needs besides: an activation. In place of a library for ``residual``, which does half of the norm behind it, stands the
``partial`` product as it is chosen, and the whole norm.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F

from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.linear.activation import silu_mul
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product
from pagebus.kernels.specialized.hopper_few import FewConfig
from pagebus.kernels.specialized.hopper_gemm import DEPTH, SpecializedConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig

ROTATED_BYTES, LEAST_LAUNCHES = 200_000_000, 3
COMPILERS = 14


class Job(NamedTuple):
    """A launch shape to be timed with ``bucket`` tokens; None: the library."""

    product: Product
    bucket: int
    config: Config | None

    @property
    def name(self) -> str:
        return f"{self.product.name} {self.config}"

    @property
    def kernel(self) -> tuple[object, ...] | None:
        """What decides which kernel is compiled; None: the library's."""
        config, product = self.config, self.product
        if config is None or isinstance(config, LibraryConfig):
            return None
        assert not isinstance(
            config, WideningConfig | FewConfig | PromptConfig
        )  # for words and prompts, timed elsewhere
        depth = DEPTH if isinstance(config, SpecializedConfig) else config.depth
        tokens = self.bucket if isinstance(config, VectorConfig) else 0
        small = product.rows * product.inputs * 2 <= 64 << 20
        sizes = (product.rows, product.inputs) if small else (product.rows % config.rows, product.inputs % depth)
        return product.form, sizes, config, tokens

    def launch(self) -> None:
        """Once."""
        Bench(self.product, 0).step(self.config, self.bucket, 0)


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
        """Median time of a step, many of them captured in one graph.

        Raises:
            Exception: this GPU does not take the launch shape.
        """
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


class Compiled(Protocol):
    """Something that may be launched once, so that its kernels are compiled."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> Hashable:
        """What decides which kernels are compiled; None: none of ours."""

    def launch(self) -> None:
        """On the GPU here."""


def compile_one(job: Compiled) -> str | None:
    """In a process of its own: launch once, so that Triton's cache has the kernel. What went wrong, if anything."""
    try:
        job.launch()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.name}: {str(error)[:200]}"
    return None


class Compilers:
    """Processes that compile kernels, which outlive one set of jobs: each needs seconds to begin. They end with the
    context."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(min(COMPILERS, os.cpu_count() or 1), context)
        self._done: set[Hashable] = set()

    def compile(self, jobs: Iterable[Compiled]) -> Iterator[str]:
        """Every kernel of ``jobs`` that is new, once; what could not be compiled."""
        new = {kernel: job for job in jobs if (kernel := job.kernel) is not None and kernel not in self._done}
        self._done |= set(new)
        yield from filter(None, self._pool.map(compile_one, new.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
