"""Stages of a pipeline on the GPUs of one host, each rank a process: are their tokens right?

    python -m tests.gpu.ranks.check_stages [--stages 2] [--width 1] [--families qwen2 gpt-oss ...] [--wide]
        [--device cpu] [--carrier peers|nccl|gloo]

Tiny random models in float32. For each: greedy tokens against transformers' (as far as these leave no doubt), sampled
ones against those of one rank, and log probabilities beside them; from CUDA graphs and without. ``--wide`` adds a
model of two layers of llama8b in bfloat16, whose greedy tokens are compared with those of one GPU. Prints a line per
model; exit code 1 if anything differs. Where there are fewer GPUs than ranks, several share one.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from pagebus.actors.executor.engine import Engine
from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.executor.ranks.gloo import DISTRIBUTED
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings
from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import StepPlan
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.gpu.ranks.check import COUNT, GOLDEN, LIMIT_S, OPTIONS, SAMPLED, START_S, answers, judge
from tests.gpu.ranks.checks import carrier_for, compile_ahead, lines_of, parser_of, ranks_of, run, wait_for
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden, make_model

CHOSEN = ("qwen2", "gemma3", "gpt-oss")
WIDE = "two layers of llama8b"
WIDE_SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048,
}  # fmt: skip
OVER = b"over"


class Log:
    """The plans of all steps, which rank 0 writes and all others read, as over a bus."""

    def __init__(self, path: Path, world: int) -> None:
        self._store, self._count = DISTRIBUTED.FileStore(str(path), world), 0

    def write(self, plan: StepPlan | None, epoch: int) -> None:
        """None: there are no more."""
        frame = {} if plan is None else {key.hex(): value.hex() for key, value in encode(plan).items()}
        self._store.set(f"plan{self._count}", json.dumps([epoch, frame]) if plan is not None else OVER)
        self._count += 1

    def follow(self, engine: Engine) -> None:
        """Give the engine all plans."""
        while (told := self._store.get(f"plan{self._count}")) != OVER:
            self._count += 1
            epoch, frame = json.loads(told)
            plan = decode({bytes.fromhex(key): bytes.fromhex(value) for key, value in frame.items()})
            engine.submit(cast("StepPlan", plan), epoch)


class Leader:
    """An engine whose plans the others get too."""

    def __init__(self, engine: Engine, log: Log) -> None:
        self._engine, self._log = engine, log

    def submit(self, plan: StepPlan, epoch: int) -> None:
        """To all."""
        self._log.write(plan, epoch)
        self._engine.submit(plan, epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class RankDriver(Driver):
    """An engine of this process, which is rank 0 of the ``settings``."""

    def __init__(self, engine: Engine, results: queue.Queue[Any], settings: Settings, log: Log | None) -> None:
        self.settings, self.results, self.epoch = settings, results, 0
        self.engine = engine if log is None else cast("Engine", Leader(engine, log))
        self.info = engine.start().result(START_S)


def open_engine(settings: Settings, folder: Path, **more: Any) -> tuple[Engine, queue.Queue[Any]]:
    """Of one rank; results and errors are in the queue."""
    results: queue.Queue[Any] = queue.Queue()
    config = rank_config(ModelConfig.load(folder), settings)
    return Engine(settings, config, on_result=results.put, on_error=results.put, path=folder, **more), results


def options_of(name: str, *, eager: bool, device: str) -> dict[str, Any]:
    dtype = "bfloat16" if name == WIDE else "float32"
    return OPTIONS | {"enforce_eager": eager, "device": device, "dtype": dtype, "spec_method": "none"}


def captures(arguments: argparse.Namespace) -> bool:
    """Whether steps may run from CUDA graphs."""
    return arguments.device == "cuda" and (arguments.width == 1 or arguments.carrier != "gloo")


def prompts_of(name: str) -> list[list[int]]:
    if name == WIDE:
        return [[(7 * place + 31 * number) % 2048 for place in range(3 + 23 * number)] for number in range(8)]
    return prompts_for(GOLDEN[name], name)


def asked(driver: Driver, name: str, *, eager: bool) -> dict[str, Any]:
    """All that is asked of a model."""
    prompts = prompts_of(name)
    found: dict[str, Any] = {"greedy": answers(driver, prompts)}
    if not eager:
        driver.synchronize()
        found["captured"] = answers(driver, prompts)
    found["sampled"] = [answers(driver, prompts, **params) for params in SAMPLED]
    return found


def run_rank(arguments: argparse.Namespace) -> None:
    """What rank 0 finds of every model, as a line of JSON each; the other ranks compute with it."""
    rank, folder, device = arguments.rank, Path(arguments.folder), arguments.device
    for name in arguments.families:
        for eager in (True, False) if captures(arguments) else (True,):
            settings = Settings(
                model=str(folder / name), rank=rank, tensor_parallel_size=arguments.width,
                pipeline_parallel_size=arguments.stages, **options_of(name, eager=eager, device=device),
            )  # fmt: skip
            key = f"{name.replace(' ', '-')}-{eager}"
            comm = meet(settings, f"file:{folder / f'store-{key}'}", "127.0.0.1", arguments.carrier, 0)
            log, began_s = Log(folder / f"plans-{key}", arguments.stages * arguments.width), time.monotonic()
            engine, results = open_engine(settings, folder / name, comm=comm)
            if rank:
                engine.start().result(START_S)
                log.follow(engine)
            else:
                driver = RankDriver(engine, results, settings, log)
                ready_s = time.monotonic() - began_s
                found = asked(driver, name, eager=eager)
                log.write(None, 0)
                told = {"name": name, "eager": eager, "ready_s": ready_s, "differing": 0}
                print("RANK0 " + json.dumps(told | {"graphs": engine.graphs_progress} | found), flush=True)
                took_s = time.monotonic() - began_s
                print(f"{key}: ready after {ready_s:.1f} s, asked after {took_s:.1f} s", file=sys.stderr, flush=True)
            comm.least(0.0)  # all have ended
            engine.stop()
    sys.stdout.flush()
    os._exit(0)


def settings_of(names: list[str], folder: Path, arguments: argparse.Namespace) -> list[Settings]:
    """Of all models, divided and on one GPU."""
    divided = {"tensor_parallel_size": arguments.width, "pipeline_parallel_size": arguments.stages}
    found = []
    for name in names:
        own = options_of(name, eager=not captures(arguments), device="cuda") | {"actor_name": "checked"}
        found += [Settings(model=str(folder / name), **own, **more) for more in (divided, {})]
    return found


def one_rank(name: str, folder: Path, device: str) -> dict[str, Any]:
    """What one rank says."""
    settings = Settings(model=str(folder / name), **options_of(name, eager=True, device=device))
    engine, results = open_engine(settings, folder / name)
    driver = RankDriver(engine, results, settings, None)
    found = asked(driver, name, eager=True)
    driver.close()
    return found


def make(name: str, folder: Path) -> list[list[int]] | None:
    """Write a model; its right tokens, if transformers are to be asked."""
    if name == WIDE:
        make_model(folder / name, "llama3", seed=9, std=0.02, **WIDE_SHAPE)
        return None
    family = GOLDEN[name]
    make_golden(folder / name, family.model_type, family.golden[name])
    return reference_tokens(folder / name, prompts_of(name), COUNT)


def run_all(arguments: argparse.Namespace) -> int:
    """Expectations of one rank and of transformers, the ranks, and what differs."""
    world, device = arguments.stages * arguments.width, arguments.device
    arguments.carrier = carrier_for(arguments, world) if arguments.width > 1 else arguments.carrier or "peers"
    names = [*arguments.families, *([WIDE] if arguments.wide else [])]
    own = ["--device", device, "--carrier", arguments.carrier, "--stages", str(arguments.stages)]
    own += ["--width", str(arguments.width), "--families", *names]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = {each: make(each, folder) for each in names}
        for compiler in compile_ahead(settings_of(names, folder, arguments)) if device == "cuda" else []:
            compiler.wait()
        with ranks_of("tests.gpu.ranks.check_stages", own, folder, world) as ranks:
            code = wait_for(ranks[0], LIMIT_S)
            found = [json.loads(line) for line in lines_of(folder, 0, "RANK0 ")]
        alone = {each: one_rank(each, folder, device) for each in {told["name"] for told in found}}
    bad = len(found) != len(names) * (2 if captures(arguments) else 1)
    if bad:
        print(f"only {len(found)} results came; rank 0 ended with {code}")
    for each in found:
        right = expected[each["name"]]
        one = alone[each["name"]]
        if right is None:  # those of one GPU, as sampled ones are: a token may be on the edge of two
            each["sampled"] += [each.pop(way) for way in ("greedy", "captured") if way in each]
            one = {"sampled": one["sampled"] + [one["greedy"]] * (len(each["sampled"]) - len(one["sampled"]))}
        bad |= judge(each, right or [], one["sampled"])
    return int(bad)


def main() -> int:
    parser = parser_of(__doc__, world=False, eager=False)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(CHOSEN))
    parser.add_argument("--wide", action="store_true")
    return run(parser.parse_args(), run_all, run_rank)


if __name__ == "__main__":
    sys.exit(main())
