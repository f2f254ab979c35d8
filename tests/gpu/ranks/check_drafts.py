"""Ranks whose drafts come from a head, an MTP layer or a small model, on the GPUs of one host, each a process: are
their tokens those of one rank without drafts, and do all ranks draft the same?

    python -m tests.gpu.ranks.check_drafts [--world 2] [--kinds KIND ...] [--carrier peers|nccl|gloo] [--eager]
        [--device cpu]

Tiny models in float32, without CUDA graphs and with: while they are captured, when each rank has others, and when all
are there. What is expected is computed on a CPU. Rank 0 has the scheduler, and tells the others its plans. Prints a
line for each kind and way; exit code 1 if a greedy token is wrong, ranks draft differently, or no draft is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.settings import Settings
from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import StepPlan
from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import accepted, asked, tokens_of
from tests.actors.executor.speculation.conftest import cheap
from tests.actors.executor.speculation.test_heads import drafted
from tests.actors.executor.speculation.test_rank_heads import KINDS, SAMPLED
from tests.actors.scheduler.rests import rest_often
from tests.gpu.ranks.check import LIMIT_S, RankDriver
from tests.gpu.ranks.checks import carrier_for, lines_of, parser_of, ranks_of, run
from tests.helpers.engine_driver import Driver

CHOSEN = ("small model", "head with the model's embedding", "mtp of latents", "mtp with its own embedding")
ASKED: list[dict[str, Any]] = [{}, SAMPLED]
Drafts = list[tuple[list[int], list[int]]]


class Told:
    """Plans that rank 0 tells the others, as files of a ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._count = folder, 0

    def tell(self, plan: StepPlan | None, epoch: int = 0) -> None:
        """None: there are no more."""
        made = self._folder / "made"
        fields = [] if plan is None else [each.hex() for pair in encode(plan).items() for each in pair]
        made.write_text(json.dumps([epoch, fields]))
        made.rename(self._folder / str(self._count))
        self._count += 1

    def plans(self) -> Iterator[tuple[StepPlan, int]]:
        """With the epoch of each, as they come."""
        while True:
            path = self._folder / str(self._count)
            while not path.exists():
                time.sleep(0.0005)
            epoch, fields = json.loads(path.read_text())
            if not fields:
                return
            names, values = (map(bytes.fromhex, fields[start::2]) for start in (0, 1))
            plan = decode(dict(zip(names, values, strict=True)))
            assert isinstance(plan, StepPlan)
            yield plan, epoch
            self._count += 1


def lead(driver: RankDriver, told: Told, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rank 0 answers: everything at first, when all graphs are there, and between steps that want no drafts."""
    submit = driver.engine.submit

    def tell(plan: StepPlan, epoch: int) -> None:
        told.tell(plan, epoch)
        submit(plan, epoch)

    driver.engine.submit = tell  # type: ignore[assignment, method-assign]
    found: dict[str, Any] = {"answers": [], "right": 0}
    for way in ("at first", "captured", "at rest"):
        if way == "captured" and driver.settings.device == "cuda":
            driver.synchronize()
        elif way == "at rest":
            rest_often(patch)
        for sampling in ASKED:
            core = asked(driver, **sampling)
            found["answers"].append(tokens_of(core))
            found["right"] += accepted(core)
    told.tell(None)
    return found


def follow(driver: RankDriver, told: Told) -> None:
    """What the other ranks do."""
    count = 0
    for plan, epoch in told.plans():
        driver.engine.submit(plan, epoch)
        count += 1
    for _ in range(count):
        driver.result()


def run_rank(arguments: argparse.Namespace) -> None:
    """What one rank finds with every drafter, as a line of JSON each."""
    rank, world, folder = arguments.rank, arguments.world, Path(arguments.folder)
    for number, kind in enumerate(arguments.kinds):
        path, drafts = json.loads((folder / f"{number}.json").read_text())
        for eager in (True,) if arguments.eager else (True, False):
            settings = Settings(rank=rank, tensor_parallel_size=world, device=arguments.device)
            comm = meet(settings, f"file:{folder / f'store-{number}-{eager}'}", "127.0.0.1", arguments.carrier, 0)
            began_s = time.monotonic()
            options = options_of(arguments.device) | {"enforce_eager": eager}
            driver = RankDriver(Path(path), comm, rank, world, **options, **drafts)
            found: dict[str, Any] = {"kind": kind, "eager": eager, "rank": rank, "answers": [], "right": 0}
            found["ready_s"], told = time.monotonic() - began_s, Told(folder / f"plans-{number}-{eager}")
            with pytest.MonkeyPatch.context() as patch:
                cheap(patch)
                watched: Drafts = drafted(driver, patch)
                if rank == 0:
                    found |= lead(driver, told, patch)
                else:
                    follow(driver, told)
            found |= {"drafts": watched, "graphs": driver.engine.graphs_progress}
            print("FOUND " + json.dumps(found), flush=True)
            comm.all_gather(torch.zeros(1))  # all have ended
            driver.engine.stop()
    sys.stdout.flush()
    os._exit(0)


def options_of(device: str) -> dict[str, Any]:
    return SETTINGS | {"device": device, "num_gpu_blocks_override": 100, "swap_space": 0}


def run_all(arguments: argparse.Namespace) -> int:
    """Drafters, expectations, the ranks, and what differs."""
    carrier = carrier_for(arguments, arguments.world)
    own = ["--eager"] if arguments.eager or carrier == "gloo" else []
    more = ["--carrier", carrier, "--device", arguments.device, "--world", str(arguments.world)]
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(arguments.kinds):
            path, drafts = KINDS[kind](Path(folder, str(number)))
            Path(folder, f"{number}.json").write_text(json.dumps([str(path), drafts]))
        more += ["--kinds", *arguments.kinds]
        with ranks_of("tests.gpu.ranks.check_drafts", [*own, *more], Path(folder), arguments.world) as ranks:
            bad = judge_all(arguments.kinds, 1 if own else 2, Path(folder), ranks)
    return int(bad)


def judge_all(kinds: list[str], ways: int, folder: Path, ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Print a line for each kind and way, when it is there; whether anything is wrong."""
    bad, began_s = False, time.monotonic()
    for number in range(len(kinds)):
        path, _ = json.loads((folder / f"{number}.json").read_text())
        plain = Driver(Path(path), **options_of("cpu"), spec_method="none")
        expected = [tokens_of(asked(plain, **sampling)) for sampling in ASKED]
        plain.close()
        for way in range(ways):
            place = number * ways + way
            while any(len(each) <= place for each in told_by(folder, len(ranks))):
                if time.monotonic() - began_s > LIMIT_S or any(each.poll() for each in ranks):
                    print(f"the ranks have ended with {[each.poll() for each in ranks]}, or take too long")
                    return True
                time.sleep(0.05)
            bad |= judge([json.loads(each[place]) for each in told_by(folder, len(ranks))], expected)
    return bad


def told_by(folder: Path, world: int) -> list[list[str]]:
    """What each rank has found so far."""
    return [lines_of(folder, rank, "FOUND ") for rank in range(world)]


def judge(found: list[dict[str, Any]], expected: list[list[list[int]]]) -> bool:
    """Print a line; whether anything is wrong."""
    first, drafts = found[0], [each["drafts"] for each in found]
    wrong = [0] * len(ASKED)
    for place, answers in enumerate(first["answers"]):
        pairs = zip(answers, expected[place % len(ASKED)], strict=True)
        wrong[place % len(ASKED)] += sum(output != known for output, known in pairs)
    unlike = sum(one != other for each in drafts[1:] for one, other in zip_longest(drafts[0], each))
    print(
        f"{first['kind']:32} {'eager ' if first['eager'] else 'graphs'} ready {first['ready_s']:5.1f} s, graphs "
        f"{[each['graphs'] for each in found]}, greedy wrong {wrong[0]}, sampled wrong {wrong[1]}, runs of drafts "
        f"{len(drafts[0])}, unlike on other ranks {unlike}, right drafts {first['right']}", flush=True,
    )  # fmt: skip
    total = len(expected[1]) * len(first["answers"]) // len(ASKED)
    return bool(wrong[0] or unlike) or not first["right"] or wrong[1] > total // 8  # a draw may be on an edge


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(CHOSEN), choices=list(KINDS))
    return run(parser.parse_args(), run_all, run_rank)


if __name__ == "__main__":
    sys.exit(main())
