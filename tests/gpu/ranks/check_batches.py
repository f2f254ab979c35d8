"""Ranks on the GPUs of one host, in large batches: steps in pieces, and answers that no batch changes.

    python -m tests.gpu.ranks.check_batches [--world 2] [--cases pieces-llama3 alone-llama3 ...] [--device cpu]

``pieces-NAME``: prompts in chunks of up to 4096 tokens beside decodes, in float32, against transformers: while graphs
of pieces are captured, and from them. ``alone-NAME``: with ``--deterministic``, in bfloat16, tokens and all bits of log
probabilities are the same alone and in any batch, after a preemption, from graphs and without. Each rank compares for
itself. Exit code 1 if anything differs. On a CPU steps are never in pieces, and nothing is deterministic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.executor.graphs.piecewise_graphs import LaunchedPieces, PiecewiseGraphs
from pagebus.actors.executor.loading import limits
from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.settings import Settings
from tests.actors.executor.models.test_families import reference_tokens
from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, SETTINGS
from tests.gpu.engine_checks import check_graphs, check_independence
from tests.gpu.ranks.check import GOLDEN, RankDriver, answers
from tests.gpu.ranks.checks import carrier_for, compile_ahead, output_of, parser_of, ranks_of, run
from tests.helpers.model_factory import CLASSES, DEFAULTS, make_golden, make_model

CASES = ("pieces-llama3", "pieces-olmo2", "pieces-gpt-oss", "alone-llama3", "alone-olmo2")
PROMPTS, COUNT, BUDGET, LIMIT_S = 40, 6, 4096, 300.0
OPTIONS: dict[str, Any] = SETTINGS | {"swap_space": 0}


def make(folder: Path, name: str) -> Path:
    """A model of several MiB of hidden states per step, or a family's own tiny one."""
    if name in CLASSES and name not in GOLDEN:
        return make_model(folder, name, seed=22, **BFLOAT16_SHAPE)
    family = GOLDEN[name]
    return make_golden(folder, family.model_type, family.golden[name])


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(DEFAULTS["vocab_size"]) for _ in range(rng.randrange(100, 240))] for _ in range(PROMPTS)]


class Counted:
    """How many passes ran from graphs of pieces, and in pieces without graphs."""

    def __init__(self) -> None:
        self.passes = {PiecewiseGraphs: 0, LaunchedPieces: 0}
        for kind in self.passes:
            kind.forward = self._counting(kind, kind.forward)  # type: ignore[method-assign]

    def _counting(self, kind: type, forward: Any) -> Any:
        def counted(*arguments: Any) -> torch.Tensor:
            self.passes[kind] += 1
            found: torch.Tensor = forward(*arguments)
            return found

        return counted


def check_pieces(driver: RankDriver, counted: Counted, expected: list[list[int]]) -> str:
    asked, before = prompts(), dict(counted.passes)
    for turn in range(2):
        found = answers(driver, asked, BUDGET, COUNT)
        wrong = sum(output[: len(known)] != known for output, known in zip(found, expected, strict=True))
        assert not wrong, f"{wrong} wrong in turn {turn}"
        if driver.engine.graphs_progress is not None:
            driver.synchronize()
    graphs, launched = (counted.passes[kind] - before[kind] for kind in (PiecewiseGraphs, LaunchedPieces))
    assert graphs or driver.engine.graphs_progress is None, "no step ran from graphs of pieces"
    return f"{graphs} passes from graphs of pieces, {launched} in pieces without, nothing wrong"


def check_alone(driver: RankDriver) -> str:
    limited = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
    together = answers(driver, prompts()[:12], 2048, COUNT, **limited)
    assert [answers(driver, [prompt], 99, COUNT, **limited)[0] for prompt in prompts()[:12]] == together
    check_independence(driver)
    check_graphs(driver)
    return "the same bits in any batch, from graphs and without"


def options_of(what: str, device: str) -> dict[str, Any]:
    own = {"max_num_batched_tokens": BUDGET} if what == "pieces" else {"dtype": "bfloat16", "deterministic": True}
    return OPTIONS | {"device": device, "max_num_seqs": 64, "actor_name": "checked"} | own


def run_rank(arguments: argparse.Namespace) -> None:
    """Every case, in one process. What was begun last is written down, for who goes on behind a failure."""
    rank, folder = arguments.rank, Path(arguments.folder)
    counted = Counted()
    for case in arguments.cases:
        began_s, (what, _, name) = time.monotonic(), case.partition("-")
        (folder / "begun").write_text(case)
        limits.MAX_GRAPH_TOKENS = 64 if what == "pieces" else 512  # larger steps run in pieces, or without graphs
        options = options_of(what, arguments.device)
        settings = Settings(rank=rank, tensor_parallel_size=arguments.world, **options)
        comm = meet(settings, f"file:{folder / f'store-{case}'}", "127.0.0.1", arguments.carrier, 0)
        driver = RankDriver(folder / name, comm, rank, arguments.world, **options)
        ready_s = time.monotonic() - began_s
        print(f"rank {rank}, {case}: ready after {ready_s:.1f} s", flush=True)
        try:
            if what == "pieces":
                told = check_pieces(driver, counted, json.loads((folder / f"{name}.json").read_text()))
            else:
                told = check_alone(driver)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        print(f"rank {rank}, {case}: {told}; {time.monotonic() - began_s - ready_s:.1f} s", flush=True)
        comm.all_gather(torch.zeros(1))  # all have ended
        driver.engine.stop()
    os._exit(0)


def settings_of(folder: Path, arguments: argparse.Namespace) -> list[Settings]:
    """Of all cases."""
    found = []
    for case in arguments.cases:
        what, _, name = case.partition("-")
        own = options_of(what, "cuda")
        found.append(Settings(model=str(folder / name), tensor_parallel_size=arguments.world, **own))
    return found


def run_ranks(cases: list[str], folder: Path, carrier: str, arguments: argparse.Namespace) -> bool:
    """Whether all ranks have ended well."""
    own = ["--carrier", carrier, "--device", arguments.device, "--world", str(arguments.world), "--cases", *cases]
    until = time.monotonic() + LIMIT_S
    with ranks_of("tests.gpu.ranks.check_batches", own, folder, arguments.world) as ranks:
        while any(process.poll() is None for process in ranks) and time.monotonic() < until:
            time.sleep(0.05)
            if any(process.poll() not in {None, 0} for process in ranks):
                break
        codes = [process.poll() for process in ranks]
    for rank in range(arguments.world):
        print(output_of(folder, rank).read_text(), end="")
    return codes == [0] * arguments.world


def run_all(arguments: argparse.Namespace) -> int:
    carrier, left, bad = carrier_for(arguments, arguments.world), list(arguments.cases), []
    with tempfile.TemporaryDirectory() as name:
        began_s, folder = time.monotonic(), Path(name)
        paths = {each: make(folder / each, each) for each in {case.partition("-")[2] for case in left}}
        compilers = compile_ahead(settings_of(folder, arguments)) if arguments.device == "cuda" else []
        for each, path in paths.items():
            if f"pieces-{each}" in left:
                (folder / f"{each}.json").write_text(json.dumps(reference_tokens(path, prompts(), COUNT)))
        if arguments.device == "cuda":
            print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}", flush=True)
        print(f"expected tokens after {time.monotonic() - began_s:.1f} s", flush=True)
        for compiler in compilers:
            compiler.wait()
        print(f"compiled after {time.monotonic() - began_s:.1f} s", flush=True)
        while left and not run_ranks(left, folder, carrier, arguments):
            bad.append((folder / "begun").read_text())
            left = left[left.index(bad[-1]) + 1 :]
    print(f"{carrier}: {len(arguments.cases) - len(bad)} cases passed, failed: {bad or 'none'}")
    return int(bool(bad))


def main() -> int:
    parser = parser_of(__doc__, eager=False)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    return run(parser.parse_args(), run_all, run_rank)


if __name__ == "__main__":
    sys.exit(main())
