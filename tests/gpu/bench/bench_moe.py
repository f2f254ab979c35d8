"""Times a layer's experts as models have them: `python -m tests.gpu.bench.bench_moe [MODEL ...] [--tune]`.

Each figure is the median of CUDA graphs of several layers, whose weights come from memory, each with its own choice of
experts, all equally likely. The floor is that of an H200: the weights of the experts that were chosen, read at
4.30 TB/s, or the products at 790 TFLOP/s. `--tune` times launch shapes for each number of tokens, with and without
sorting, and prints the best; `--parts` also times each kernel alone, one after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.linear.tuning.timing import graph_microseconds
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.experts import moe_experts
from pagebus.kernels.moe.grouped import combine, grouped_experts
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, Unsorted
from pagebus.kernels.moe.routing import route
from pagebus.kernels.moe.sorting import sort_pairs
from pagebus.kernels.moe.timing import random_experts
from tests.gpu.moe_cases import (
    CUDA,
    MODELS,
    Model,
    distinct_kernels,
    group_candidates,
    item_sizes,
    unsorted_candidates,
)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
TUNED = (1, 4, 8, 32, 64, 256, 4096)
LAYERS, BEST = 6, 3


class Chosen(NamedTuple):
    """Tokens and their experts in one layer."""

    x: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor


class Bench:
    """Two layers of a model, which are larger than the L2 cache, and what launches read."""

    def __init__(self, model: Model, tokens: int, layers: list[Any]) -> None:
        self.model, self.tokens, self.layers = model, tokens, layers
        self.chosen = [self._choose() for _ in range(LAYERS)]
        self.hit = sum(len(each.experts.unique()) for each in self.chosen) / LAYERS

    def _choose(self) -> Chosen:
        shape = self.model.shape
        x = torch.randn(self.tokens, shape.hidden, device=CUDA).bfloat16()
        logits = torch.randn(self.tokens, shape.experts, device=CUDA)
        return Chosen(x, logits, torch.rand(self.tokens, shape.top_k, device=CUDA), random_experts(self.tokens, shape))

    def microseconds(self, call: Callable[[Chosen, Any], object]) -> float:
        """Of one call, for each layer's tokens in turn."""
        calls = [partial(call, one, self.layers[index % len(self.layers)]) for index, one in enumerate(self.chosen)]
        return graph_microseconds(calls)

    def experts(self, config: Config) -> float:
        return self.microseconds(lambda one, layer: moe_experts(one.x, one.weights, one.experts, layer, config))

    def routing(self) -> float:
        return self.microseconds(lambda one, _: route(one.logits, self.model.routing))


def line(name: str, bench: Bench, chosen: Config, *, parts: bool) -> None:
    """One number of tokens with the launch shape that is chosen."""
    model, tokens = bench.model, bench.tokens
    floor, took, routed = model.floor(tokens, bench.hit), bench.experts(chosen), bench.routing()
    invariant = bench.experts(choose_invariant(tokens, model.shape, torch.bfloat16))
    speed = model.operations(tokens) / took / 1e6
    print(
        f"{name:18} {tokens:>6} {bench.hit:6.1f} {floor:8.1f} {took:8.1f} {floor / took:6.0%} {speed:8.0f} "
        f"{routed:7.1f} {invariant:9.1f}  {chosen}",
        flush=True,
    )
    if parts and isinstance(chosen, Grouped):
        print(f"{'':18} alone: " + ", ".join(f"{key} {value:.1f}" for key, value in parts_of(bench, chosen).items()))


def parts_of(bench: Bench, chosen: Grouped) -> dict[str, float]:
    """Each kernel alone; both products together, as they share what they read."""
    shape = bench.model.shape
    sorts = {id(one.experts): sort_pairs(one.experts, shape.experts, chosen.tokens) for one in bench.chosen}
    products = torch.empty(bench.tokens, shape.top_k, shape.hidden, dtype=torch.bfloat16, device=CUDA)

    def multiply(one: Chosen, layer: Any) -> object:
        return grouped_experts(one.x, one.weights, one.experts, layer, sorts[id(one.experts)], *chosen[1:])

    combined = bench.microseconds(lambda one, _: combine(products, one.weights, one.experts))
    return {
        "sort": bench.microseconds(lambda one, _: sort_pairs(one.experts, shape.experts, chosen.tokens)),
        "products": bench.microseconds(multiply) - combined,
        "combine": combined,
    }


def candidates(model: Model, tokens: int) -> list[Config]:
    """Launch shapes in which one of both products is as chosen, so that each can be judged alone."""
    found: list[Config] = []
    if tokens <= 16:
        gate_ups, downs = unsorted_candidates(model.shape)
        found += [Unsorted(each, downs[0]) for each in gate_ups] + [Unsorted(gate_ups[0], each) for each in downs]
    for size in item_sizes(tokens, model.shape):
        plain = GroupConfig(64, 64, 3, 8 if size >= 128 else 4, tma=True)
        found += [Grouped(size, each, plain) for each in group_candidates(size, gated=True)]
        found += [Grouped(size, plain, each) for each in group_candidates(size, gated=False)]
    return found


def kernels_of(model: Model, counts: Sequence[int]) -> list[Config]:
    """Launch shapes for these numbers of tokens that need kernels of their own."""
    return distinct_kernels([config for tokens in counts for config in candidates(model, tokens)])


def compile_one(job: tuple[str, Config]) -> str | None:
    """In a process of its own: launch once, so that Triton's cache has the kernels. What went wrong, if anything."""
    name, config = job
    model = MODELS[name]
    try:
        shape = model.shape._replace(experts=2 * model.shape.top_k)
        few = replace(model, shape=shape)
        layer = few.layer()
        one = Bench(few, 2, [layer]).chosen[0]
        moe_experts(one.x, one.weights, one.experts, layer, config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {config}: {str(error)[:200]}"
    return None


def compile_all(jobs: list[tuple[str, Config]]) -> None:
    """Every kernel once, in parallel."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), context) as pool:
        for failure in pool.map(compile_one, jobs, chunksize=4):
            if failure:
                print(failure, flush=True)


def tune(name: str, bench: Bench) -> None:
    """Prints the best launch shapes, and what they take together."""
    timed: dict[tuple[str, int, str], list[tuple[float, Any]]] = {}
    for config in candidates(bench.model, bench.tokens):
        try:
            took = bench.experts(config)
        except Exception as error:  # a launch shape that this GPU does not take
            print(f"{config}: {str(error)[:100]}")
            continue
        way, size = type(config).__name__, config.tokens if isinstance(config, Grouped) else 0
        timed.setdefault((way, size, "gate_up"), []).append((took, config.gate_up))
        timed.setdefault((way, size, "down"), []).append((took, config.down))
    for way, size in sorted({key[:2] for key in timed}):
        best = {product: ranked(timed[way, size, product]) for product in ("gate_up", "down")}
        both = best["gate_up"][0][1], best["down"][0][1]
        config = Grouped(size, *both) if size else Unsorted(*both)
        took, floor = bench.experts(config), bench.model.floor(bench.tokens, bench.hit)
        print(f"{name:18} {bench.tokens:>6} {way} {size}: {took:8.1f} us, floor {floor:.1f} | {config}", flush=True)
        for product, ranking in best.items():
            print(f"{'':26} {product}: " + "; ".join(f"{each:.1f} {config}" for each, config in ranking))


def ranked(timed: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """The best, each launch shape once, by its shortest time."""
    shortest: dict[Any, float] = {}
    for took, config in timed:
        shortest[config] = min(took, shortest.get(config, took))
    return sorted(((took, config) for config, took in shortest.items()), key=lambda pair: pair[0])[:BEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--tokens", nargs="+", type=int, help="only these numbers of tokens")
    parser.add_argument("--tune", action="store_true", help="time launch shapes and print the best")
    parser.add_argument("--parts", action="store_true", help="also time each kernel alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    names, target = options.models or list(MODELS), target_of(torch.device(CUDA, torch.cuda.current_device()))
    if options.tune:
        begun = time.monotonic()
        compile_all([(name, each) for name in names for each in kernels_of(MODELS[name], options.tokens or TUNED)])
        print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    print(
        f"{'experts of':18} {'tokens':>6} {'hit':>6} {'floor us':>8} {'us':>8} {'share':>6} {'TFLOP/s':>8} "
        f"{'routing':>7} {'invariant':>9}  launch shapes"
    )
    for name in names:
        layers = [MODELS[name].layer() for _ in range(2)]
        for tokens in options.tokens or (TUNED if options.tune else TOKENS):
            bench = Bench(MODELS[name], tokens, layers)
            chosen = choose(tokens, bench.model.shape, torch.bfloat16, target)
            line(name, bench, chosen, parts=options.parts)
            if options.tune:
                tune(name, bench)
        del layers, bench


if __name__ == "__main__":
    main()
