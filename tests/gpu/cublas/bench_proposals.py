"""Times what the library proposes for products, beside what it takes by itself, by turns.

    python -m tests.gpu.cublas.bench_proposals times.jsonl [--tokens 96 128 160 192 224 256] [--models qwen2.5-32b ...]

Each line has a product's tokens, rows and inputs, and microseconds: ``own`` of the library's choice, and of each
proposal by its place and its tile's number. ``python -m tests.kernels.cublas.fit_rates times.jsonl`` judges the rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from pagebus.kernels.cublas.binding import Proposal, tile_of
from pagebus.kernels.cublas.plan import Plan, Shape

CUDA = torch.device("cuda", 0)
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "qwen2.5-32b": ((55296, 5120), (5120, 27648), (7168, 5120), (5120, 5120)),
    "llama8b": ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)),
    "llama8b-tp2": ((14336, 4096), (4096, 7168), (3072, 4096), (4096, 2048)),
    "llama70b-tp2": ((28672, 8192), (8192, 14336), (5120, 8192), (8192, 4096)),
    "qwen2.5-1.5b": ((17920, 1536), (1536, 8960), (2048, 1536), (1536, 1536)),
    "gemma2-9b": ((28672, 3584), (3584, 14336), (8192, 3584), (3584, 4096)),
    "phi4-14b": ((35840, 5120), (5120, 17920), (7680, 5120)),
    "glm4-9b": ((27392, 4096), (4096, 13696), (4608, 4096)),
    "qwen2.5-7b": ((37888, 3584), (3584, 18944), (4608, 3584)),
    "llama3.2-1b": ((16384, 2048), (2048, 8192), (3072, 2048), (2048, 2048)),
    "qwen2.5-3b": ((22016, 2048), (2048, 11008), (2560, 2048)),
    "phi3-mini": ((16384, 3072), (3072, 8192), (9216, 3072), (3072, 3072)),
    "gemma3-12b": ((30720, 3840), (3840, 15360), (8192, 3840), (3840, 4096)),
    "qwen3-0.6b": ((6144, 1024), (1024, 3072), (4096, 1024), (1024, 2048)),
}
"""Rows and inputs."""
ROTATED_BYTES, LONG_US, MOST = 300_000_000, 1500, 24
"""Of weights, more than the L2 cache holds; how long about a turn takes; and launches of one, at most."""
TURNS = 5


def graph_of(launch: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """Of so many products, one behind the other."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    return graph


def times_of(tokens: int, rows: int, inputs: int) -> dict[str, float]:
    """Median microseconds of each way to compute a product."""
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=CUDA)
    different = min(6, ROTATED_BYTES // (2 * rows * inputs) + 1)
    weights = [torch.randn(rows, inputs, dtype=x.dtype, device=CUDA) * 0.02 for _ in range(different)]
    out = torch.empty(tokens, rows, dtype=x.dtype, device=CUDA)
    plan = Plan(Shape(tokens, rows, inputs, inputs, x.dtype, 0))
    count = int(LONG_US / max(12, 2 * tokens * rows * inputs / 7e8, 2 * rows * inputs / 4e6))
    count = max(1, min(MOST, count))
    graphs = {"own": graph_of(lambda index: torch.mm(x, weights[index % different].t(), out=out), count)}
    for place, proposal in enumerate(plan.proposals):

        def launch(index: int, algorithm: Proposal = proposal) -> None:
            plan.launch(algorithm, x, weights[index % different], out)

        graphs[f"{place}:{tile_of(proposal)}"] = graph_of(launch, count)
    return {name: us / count for name, us in _by_turns(graphs).items()}


def _by_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median microseconds of a replay."""
    events = defaultdict(list)
    for turn in range(TURNS + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            if turn:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(1e3 * begin.elapsed_time(end) for begin, end in pairs) for name, pairs in events.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("--tokens", nargs="+", type=int, default=[96, 128, 160, 192, 224, 256])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    with arguments.times.open("w") as file:
        for tokens in arguments.tokens:
            for model in arguments.models:
                for rows, inputs in SIZES[model]:
                    times = {name: round(us, 2) for name, us in times_of(tokens, rows, inputs).items()}
                    line = {"model": model, "tokens": tokens, "rows": rows, "inputs": inputs, "us": times}
                    print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
