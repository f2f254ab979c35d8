"""Ranks with adapters on the GPUs of one host, each a process: are their tokens those of the merged model?

    python -m tests.gpu.ranks.check_adapters [--world 2] [--carrier peers|nccl|gloo] [--eager] [--device cpu]

A tiny Llama in float32, alone and with three adapters of mixed ranks, all in the same steps; from CUDA graphs and
without. Each rank reads the adapters and says so for itself. Exit code 1 if a token differs, or a rank has failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.settings import Settings
from pagebus.bus.messages import AdapterPlaced, AdapterRead, AdapterSource, StepResult
from tests.gpu.ranks.check import COUNT, LIMIT_S, OPTIONS, START_S, RankDriver
from tests.gpu.ranks.checks import carrier_for, output_of, parser_of, ranks_of, run
from tests.helpers.engine_driver import ints
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
    """A scheduler whose first plan has this rank read all adapters, and whose second puts them into blocks."""
    scheduler, sources = driver.scheduler(100), tuple(case.source for case in cases if case.source is not None)
    plan = scheduler._message([], [], [])
    driver.engine.submit(replace(plan, loaded_adapters=sources), driver.epoch)
    told = [driver.results.get(timeout=START_S) for _ in range(1 + len(sources))]
    assert all(isinstance(each, StepResult | AdapterRead) for each in told), told
    read = {each.digest: each for each in told if isinstance(each, AdapterRead)}
    assert not [each.error for each in read.values() if each.error]
    placed = tuple(AdapterPlaced(digest=each.digest, num_blocks=read[each.digest].num_blocks) for each in sources)
    blocks = ints([scheduler.free_blocks.pop() for each in placed for _ in range(each.num_blocks)])
    plan = replace(scheduler._message([], [], []), placed_adapters=placed, adapter_blocks=blocks)
    driver.engine.submit(plan, driver.epoch)
    assert isinstance(driver.results.get(timeout=START_S), StepResult)
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
    carrier = carrier_for(arguments, arguments.world)
    own = ["--eager"] if arguments.eager or carrier == "gloo" else []
    own += ["--carrier", carrier, "--device", arguments.device, "--world", str(arguments.world)]
    with tempfile.TemporaryDirectory() as folder:
        base = make_model(Path(folder, "base"), "llama3", seed=3, std=0.08, head_dim=64, **SIZES)
        cases = [Case(*case) for case in make_cases(base, Path(folder), ADAPTERS)]
        assert len({str(case.answers) for case in cases}) == len(cases), "the adapters do not differ"
        Path(folder, "cases").write_bytes(msgspec.json.encode(cases))
        with ranks_of("tests.gpu.ranks.check_adapters", own, Path(folder), arguments.world) as ranks:
            codes = [process.wait(LIMIT_S) for process in ranks]
        for rank in range(arguments.world):
            print(output_of(Path(folder), rank).read_text(), end="")
    print(f"{carrier}: exit codes {codes}")
    return int(any(codes))


def main() -> int:
    return run(parser_of(__doc__).parse_args(), run_all, run_rank)


if __name__ == "__main__":
    sys.exit(main())
