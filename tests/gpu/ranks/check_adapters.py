"""Ranks with adapters on the GPUs of one host, each a process: are their tokens those of the merged model?

    python -m tests.gpu.ranks.check_adapters [--world 2] [--carrier peers|nccl|gloo] [--eager] [--device cpu]

A tiny Llama in float32, alone and with three adapters of mixed ranks, all in the same steps; from CUDA graphs and
without. Each rank reads the adapters and says so for itself. Exit code 1 if a token differs, or a rank has failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.executor.ranks.links import avoid_multicast
from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.settings import Settings
from pagebus.bus.messages import AdapterRead, AdapterSource, StepResult
from tests.gpu.ranks.check import COUNT, LIMIT_S, OPTIONS, START_S, RankDriver
from tests.helpers.model_factory import make_model
from tests.system.lora.test_tokens import make_cases

ADAPTERS = 3
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


class Case(msgspec.Struct):
    """What is asked of an adapter, or of the model alone, and what it answers."""

    source: AdapterSource | None
    prompts: list[list[int]]
    answers: list[list[int]]


def load(driver: RankDriver, cases: list[Case]) -> Any:
    """A scheduler whose first plan has this rank read all adapters; waits until it has."""
    scheduler, sources = driver.scheduler(100), tuple(case.source for case in cases if case.source is not None)
    plan = scheduler._message([], [], [])
    driver.engine.submit(replace(plan, loaded_adapters=sources), driver.epoch)
    told = [driver.results.get(timeout=START_S) for _ in range(1 + len(sources))]
    assert all(isinstance(each, StepResult | AdapterRead) for each in told), told
    assert not [each.error for each in told if isinstance(each, AdapterRead) and each.error]
    return scheduler


def wrong(driver: RankDriver, cases: list[Case]) -> int:
    """How many answers are not those of the merged model."""
    scheduler = load(driver, cases)
    asked = [
        (scheduler.add(prompt, COUNT, adapter="" if case.source is None else case.source.digest), answer)
        for case in cases
        for prompt, answer in zip(case.prompts, case.answers, strict=True)
    ]
    driver.drive(scheduler)
    return sum(sequence.output != answer for sequence, answer in asked)


def run_rank(arguments: argparse.Namespace) -> None:
    avoid_multicast()
    if arguments.device == "cuda":
        torch.cuda.set_device(arguments.rank % torch.cuda.device_count())
    rank, world, folder, device = arguments.rank, arguments.world, Path(arguments.folder), arguments.device
    cases, bad = msgspec.json.decode((folder / "cases").read_bytes(), type=list[Case]), 0
    for eager in (True,) if arguments.eager else (True, False):
        settings = Settings(rank=rank, tensor_parallel_size=world, device=device)
        comm = meet(settings, f"file:{folder / f'store-{eager}'}", "127.0.0.1", arguments.carrier, 0)
        options = OPTIONS | {"enforce_eager": eager, "device": device, "enable_lora": True, "max_loras": ADAPTERS}
        driver = RankDriver(folder / "base", comm, rank, world, **options)
        found = [wrong(driver, cases)]
        if not eager:
            driver.synchronize()
            found.append(wrong(driver, cases))
        way, graphs = "eager" if eager else "graphs", driver.engine.graphs_progress
        print(f"rank {rank}, {way}: {found} wrong of {sum(len(case.prompts) for case in cases)}, {graphs}", flush=True)
        bad += sum(found)
        comm.all_gather(torch.zeros(1))  # all have ended
        driver.engine.stop()
    sys.stdout.flush()
    os._exit(int(bad > 0))


def run_all(arguments: argparse.Namespace) -> int:
    enough = arguments.device == "cuda" and torch.cuda.device_count() >= arguments.world
    carrier = arguments.carrier or ("peers" if enough else "gloo")
    own = ["--eager"] if arguments.eager or carrier == "gloo" else []
    with tempfile.TemporaryDirectory() as folder:
        base = make_model(Path(folder, "base"), "llama3", seed=3, std=0.08, head_dim=64, **SIZES)
        cases = [Case(*case) for case in make_cases(base, Path(folder), ADAPTERS)]
        assert len({str(case.answers) for case in cases}) == len(cases), "the adapters do not differ"
        Path(folder, "cases").write_bytes(msgspec.json.encode(cases))
        command = [sys.executable, "-m", "tests.gpu.ranks.check_adapters", "--folder", folder, "--carrier", carrier]
        command += ["--device", arguments.device, "--world", str(arguments.world), *own]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], preexec_fn=die_with_parent())
            for rank in range(arguments.world)
        ]
        try:
            codes = [process.wait(LIMIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    print(f"{carrier}: exit codes {codes}")
    return int(any(codes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--carrier", choices=("peers", "nccl", "gloo"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.rank is None:
        return run_all(arguments)
    run_rank(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
