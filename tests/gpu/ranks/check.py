"""Ranks on the GPUs of one host, each a process: are their tokens right, and their sums equal to the last bit?

    python -m tests.gpu.ranks.check [--world 2] [--families qwen2 gpt-oss ...] [--carrier peers|nccl|gloo] [--eager]
        [--expert-parallel] [--device cpu]

Tiny random models in float32. For each: greedy tokens against transformers' (as far as these leave no doubt), sampled
ones against those of one rank, and log probabilities beside them; from CUDA graphs and without. Without graphs all sums
over ranks are compared by their bits. Prints a line per model; exit code 1 if anything differs. With fewer GPUs than
ranks several share one, over gloo, without graphs.
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
from typing import Any

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.engine import Engine
from pagebus.actors.executor.rank_actors import meet
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.settings import Settings
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.gpu.engine.engine_cases import SETTINGS
from tests.gpu.ranks.checks import carrier_for, compile_ahead, lines_of, parser_of, ranks_of, run, wait_for
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden

GOLDEN = {next(iter(family.golden)): family for family in FAMILIES}
CHOSEN = ("llama-yarn", "qwen2", "olmo2", "gemma3", "cohere", "qwen3-moe", "gpt-oss", "deepseek-v2-lite")
COUNT = 12
START_S, LIMIT_S = 240.0, 400.0
OPTIONS = {**SETTINGS, "max_model_len": 300, "swap_space": 0, "max_num_seqs": 8, "max_num_batched_tokens": 512}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 6, "logprobs": 3, "bad_words_token_ids": ((5, 6), (200,))},
]


class Summed:
    """Notes the bits of all sums of a group; for a pass without graphs."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.sums, self._sum = comm, [], comm.all_reduce
        comm.all_reduce = self._noted  # type: ignore[method-assign]

    def _noted(self, x: torch.Tensor) -> torch.Tensor:
        total = self._sum(x)
        self.sums.append(total.contiguous().view(torch.int32).long().sum())
        return total

    def differing(self) -> int:
        """How many sums are not the same on all ranks."""
        found = torch.stack(self.sums).cpu()
        every = self.comm.all_gather(found)
        return int((every != every[:1]).any(0).sum())


class RankDriver(Driver):
    """An engine of this process, which is one of the ranks: all run the same schedule by themselves."""

    def __init__(self, folder: Path, comm: Comm | None, rank: int, world: int, **settings: Any) -> None:
        self.settings = Settings(model=str(folder), rank=rank, tensor_parallel_size=world, **settings)
        self.results = queue.Queue()
        by_expert = self.settings.enable_expert_parallel
        config = local_config(ModelConfig.load(folder), rank, world, by_expert=by_expert)
        more = {} if comm is None else {"comm": comm}
        self.engine = Engine(
            self.settings, config, on_result=self.results.put, on_error=self.results.put, path=folder, **more
        )
        self.info = self.engine.start().result(START_S)
        self.epoch = 0


def answers(
    driver: Driver, prompts: list[list[int]], budget: int = 100, count: int = COUNT, **params: Any
) -> list[list[int]]:
    scheduler = driver.scheduler(budget)
    sequences = [scheduler.add(prompt, count, **params) for prompt in prompts]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


def run_rank(arguments: argparse.Namespace) -> None:
    """What one rank finds of every model, as a line of JSON each, of rank 0."""
    rank, world, folder, device = arguments.rank, arguments.world, Path(arguments.folder), arguments.device
    for name in arguments.families:
        prompts = prompts_for(GOLDEN[name], name)
        for eager in (True,) if arguments.eager else (True, False):
            options = OPTIONS | {"enforce_eager": eager, "device": device}
            options["enable_expert_parallel"] = arguments.expert_parallel
            settings = Settings(rank=rank, tensor_parallel_size=world, device=device)
            comm = meet(settings, f"file:{folder / f'store-{name}-{eager}'}", "127.0.0.1", arguments.carrier, 0)
            summed = Summed(comm) if eager else None
            began_s = time.monotonic()
            driver = RankDriver(folder / name, comm, rank, world, **options)
            ready_s, found = time.monotonic() - began_s, {"greedy": answers(driver, prompts)}
            if not eager:
                driver.synchronize()
                found["captured"] = answers(driver, prompts)
            found["sampled"] = [answers(driver, prompts, **params) for params in SAMPLED]
            graphs = driver.engine.graphs_progress
            differing = 0 if summed is None else summed.differing()
            if rank == 0:
                told = {"name": name, "eager": eager, "ready_s": ready_s, "differing": differing, "graphs": graphs}
                print("RANK0 " + json.dumps(told | found), flush=True)
                took_s, way = time.monotonic() - began_s, "eager" if eager else "graphs"
                print(f"{name}, {way}: ready after {ready_s:.1f} s, asked after {took_s:.1f} s", file=sys.stderr)
            comm.all_gather(torch.zeros(1))  # all have ended
            driver.engine.stop()
    sys.stdout.flush()
    os._exit(0)


def run_all(arguments: argparse.Namespace) -> int:
    """Expectations of one rank and of transformers, the ranks, and what differs."""
    carrier, world = carrier_for(arguments, arguments.world), arguments.world
    eager = arguments.eager or carrier == "gloo"
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), {}
        for each in arguments.families:
            make_golden(folder / each, GOLDEN[each].model_type, GOLDEN[each].golden[each])
        compilers = compile_ahead(settings_of(folder, arguments)) if arguments.device == "cuda" else []
        for each in arguments.families:
            expected[each] = reference_tokens(folder / each, prompts_for(GOLDEN[each], each), COUNT)
        for compiler in compilers:
            compiler.wait()
        own = ["--carrier", carrier, "--device", arguments.device, "--world", str(world)]
        own += ["--families", *arguments.families, *(["--eager"] if eager else [])]
        own += ["--expert-parallel"] if arguments.expert_parallel else []
        with ranks_of("tests.gpu.ranks.check", own, folder, world) as ranks:
            code = wait_for(ranks[0], LIMIT_S)
            found = [json.loads(line) for line in lines_of(folder, 0, "RANK0 ")]
        alone = one_rank(arguments.families, folder, arguments.device) if found else {}
    bad = len(found) != len(arguments.families) * (1 if eager else 2)
    if bad:
        print(f"only {len(found)} results came; rank 0 ended with {code}")
    for each in found:
        bad |= judge(each, expected[each["name"]], alone[each["name"]])
    return int(bad)


def settings_of(folder: Path, arguments: argparse.Namespace) -> list[Settings]:
    """Of all families."""
    own = OPTIONS | {"device": "cuda", "tensor_parallel_size": arguments.world, "actor_name": "checked"}
    own["enable_expert_parallel"] = arguments.expert_parallel
    return [Settings(model=str(folder / name), **own) for name in arguments.families]


def one_rank(families: list[str], folder: Path, device: str) -> dict[str, list[Any]]:
    """What one rank samples of each model."""
    told = {}
    for name in families:
        driver = RankDriver(folder / name, None, 0, 1, **OPTIONS | {"enforce_eager": True, "device": device})
        told[name] = [answers(driver, prompts_for(GOLDEN[name], name), **params) for params in SAMPLED]
        driver.close()
    return told


def judge(found: dict[str, Any], expected: list[list[int]], alone: list[Any]) -> bool:
    """Print a line of one model; whether anything is wrong."""
    wrong = found["differing"]
    for way in ("greedy", "captured"):
        if way in found:
            pairs = zip(found[way], expected, strict=True)
            wrong += sum(output[: len(known)] != known for output, known in pairs)
    others = sum(
        one != two for each in zip(found["sampled"], alone, strict=True) for one, two in zip(*each, strict=True)
    )
    total = sum(map(len, alone))
    print(
        f"{found['name']:14} {'eager ' if found['eager'] else 'graphs'} ready {found['ready_s']:5.1f} s, graphs "
        f"{found['graphs']}, sums that differ {found['differing']}, wrong {wrong}, sampled unlike one rank "
        f"{others} of {total}", flush=True,
    )  # fmt: skip
    return bool(wrong) or others > total // 8  # a draw may be on the edge of two tokens


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--families", nargs="+", default=list(CHOSEN))
    parser.add_argument("--expert-parallel", action="store_true")
    return run(parser.parse_args(), run_all, run_rank)


if __name__ == "__main__":
    sys.exit(main())
