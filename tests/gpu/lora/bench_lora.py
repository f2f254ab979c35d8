"""Times a layer of Llama-3.1-8B with adapters on all seven modules: `python -m tests.gpu.lora.bench_lora [--parts]`.

Each figure is the median of CUDA graphs of eight layers, whose weights and adapters come from memory. It has the four
products of a layer with their norms, an eighth of the plan of a step, and no attention. The floor is the time to read
the adapters of a step at the speed at which an H200 copies memory, 4.30 TB/s; the goal is what issue 22 leaves for a
layer. `--parts` also times each product with and without adapters, and the first half as a launch of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import torch

from pagebus.kernels.layers.norm import rms_norm
from pagebus.kernels.linear import adapted
from pagebus.kernels.linear.tuning.timing import graph_microseconds
from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.lora.shrink import shrink
from tests.gpu.lora.lora_cases import CUDA, HIDDEN, PRODUCTS, Decodes, Stream, decodes, layers, random, tables

COPY_BYTES_PER_US = 4.30e6
TOKENS, ADAPTERS, RANKS, LAYERS = (1, 32, 64, 256), (1, 8, 64), (16, 64), 8
GOALS = {1: 300 / 32, 32: 450 / 32, 256: 800 / 32}
GOAL_OF_MANY = 2150 / 32
"""Microseconds that adapters may add to a layer, by tokens; and 64 of them in 64 tokens."""
Tables = list[dict[str, PagedTable]] | None


class Planned:
    """The plan of each graph, made in front of its first layer."""

    def __init__(self, rows: Decodes | None) -> None:
        self._rows = rows
        self._plan: AdapterPlan | None = None

    def of(self, index: int) -> AdapterPlan | None:
        if index == 0 and self._rows is not None:
            self._plan = self._rows.plan()
        return self._plan


class Bench:
    """What the layers of a step of so many tokens read and write."""

    def __init__(self, tokens: int) -> None:
        self.residual, self.attended = random(tokens, HIDDEN), random(tokens, HIDDEN)
        self.inputs = {name: random(tokens, inputs) for name, (inputs, _) in PRODUCTS.items()}

    def step(self, tables: Tables, rows: Decodes | None) -> float:
        """Microseconds of a layer."""
        first: Stream = rms_norm(self.residual, layers()[0].norm.weight, 1e-5)
        stream, plan = [first], Planned(rows)

        def call(index: int) -> None:
            if index == 0:
                stream[0] = first
            of_layer = tables[index % 2] if tables else None
            stream[0] = layers()[index % 2](stream[0], self.residual, self.attended, of_layer, plan.of(index))

        return graph_microseconds([partial(call, index) for index in range(LAYERS)])

    def products(self, tables: Tables, rows: Decodes | None) -> list[float]:
        """Microseconds of each product with the norm that may follow it."""
        plan = Planned(rows)

        def call(name: str, index: int) -> None:
            layer, of_layer = layers()[index % 2], tables[index % 2] if tables else None
            product = layer.product(name, self.inputs[name], self.residual, of_layer, plan.of(index))
            if name in ("o", "down"):
                layer.added(product, self.residual)

        return [graph_microseconds([partial(call, name, index) for index in range(LAYERS)]) for name in PRODUCTS]

    def shrinks(self, tables: list[dict[str, PagedTable]], plan: AdapterPlan) -> list[float]:
        """Microseconds of the first half of each product."""
        calls: list[list[Callable[[], object]]] = [
            [partial(shrink, self.inputs[name], tables[index % 2][name], plan) for index in range(LAYERS)]
            for name in PRODUCTS
        ]
        return [graph_microseconds(each) for each in calls]


def tile_up_to(most: int) -> None:
    """Have tiles make the first half, and add the second, of up to so many tokens; 0: as engines do."""
    if most:
        adapted.MOST_WITHIN.update(dict.fromkeys(adapted.MOST_WITHIN, most))


def compile_all(tokens: int, most: int, page_size: int) -> None:
    """In a process of its own: launch everything once, so that Triton's cache has the kernels."""
    tile_up_to(most)
    bench, some = Bench(tokens), tables(1, 16, page_size)
    for given in (None, some):
        stream = rms_norm(bench.residual, layers()[0].norm.weight, 1e-5)
        layers()[0](stream, bench.residual, bench.attended, given, decodes(tokens, 1).plan() if given else None)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--adapters", nargs="+", type=int, default=ADAPTERS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--parts", action="store_true", help="also time what a layer consists of")
    parser.add_argument("--within", nargs="+", type=int, default=[0], help="see `tile_up_to`; each in turn")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[0], help="in elements; each in turn; 0: one page")
    options = parser.parse_args()
    begun, jobs = time.monotonic(), list(product(options.tokens, options.within, options.page_sizes))
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        list(pool.map(compile_all, *zip(*jobs, strict=True)))
    print(f"{torch.cuda.get_device_name(CUDA)}, compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for most, page_size in product(options.within, options.page_sizes):
        tile_up_to(most)
        print(f"the first half within tiles of up to {adapted.MOST_WITHIN} tokens, pages of {page_size} elements")
        _measure(options, page_size)


def _measure(options: argparse.Namespace, page_size: int) -> None:
    benches = {tokens: Bench(tokens) for tokens in options.tokens}
    bases = {tokens: bench.step(None, None) for tokens, bench in benches.items()}
    plain = {tokens: bench.products(None, None) for tokens, bench in benches.items() if options.parts}
    print(f"{'tokens':>6} {'adapters':>8} {'rank':>4} {'base us':>8} {'us':>8} {'more':>6} {'goal':>6} {'floor':>6}")
    for rank in options.ranks:
        for number in options.adapters:
            both = [tables(number, rank, page_size) for _ in range(2)]
            bytes_ = sum((len(widths) * inputs + sum(widths)) * rank * 2 for inputs, widths in PRODUCTS.values())
            for tokens, bench in benches.items():
                if number > tokens:
                    continue
                rows, base = decodes(tokens, number), bases[tokens]
                took, floor = bench.step(both, rows), number * bytes_ / COPY_BYTES_PER_US
                goal = GOAL_OF_MANY if number == tokens == 64 else GOALS.get(tokens, 0.0)
                print(
                    f"{tokens:>6} {number:>8} {rank:>4} {base:>8.1f} {took:>8.1f} {took - base:>6.1f} {goal:>6.1f} "
                    f"{floor:>6.1f}",
                    flush=True,
                )
                if options.parts:
                    _print_parts(bench, plain[tokens], both, rows)
            del both
    for tokens, bench in benches.items():
        base, took = bases[tokens], bench.step([tables(1, 16, page_size)] * 2, decodes(tokens, 0))
        print(f"{tokens:>6} {0:>8}    - {base:>8.1f} {took:>8.1f} {took - base:>6.1f}   no token has an adapter")


def _print_parts(bench: Bench, plain: list[float], both: list[dict[str, PagedTable]], rows: Decodes) -> None:
    parts = zip(PRODUCTS, plain, bench.products(both, rows), bench.shrinks(both, rows.plan()), strict=True)
    for name, base, took, first in parts:
        print(f"{'':>16} {name:>10}: {base:.1f} -> {took:.1f}, {took - base:.1f} more; first half apart {first:.1f}")


if __name__ == "__main__":
    main()
