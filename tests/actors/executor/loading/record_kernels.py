"""What a rehearsal records, and what a random workload launches beyond it: `python record_kernels.py FOLDER SETTINGS`.

A process of its own, because Triton's driver is exchanged and its interpreter must be off. Prints JSON.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import knobs

from pagebus.actors.executor.loading.compilation import Recorder, record
from pagebus.actors.executor.loading.dry_run import make_runner
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings
from pagebus.kernels.common.target import Target
from tests.helpers.engine_driver import HandScheduler

H200 = Target(90, 132)
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05, "logprobs": 5},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 0},
    {"logit_bias": {11: 4.0, 12: -3.0}, "min_tokens": 5, "end_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 300, 2)), "logprobs": 3},
    {"bad_words_token_ids": ((7,), (9, 4), (12, 200, 31)), "prompt_logprobs": 2},
    {"pooled_from": 0},
]


def run_workload(settings: Settings, config: ModelConfig, num_sequences: int, longest: int, seed: int) -> None:
    """Random prompts of 1 to ``longest`` tokens, the last of just so many, with every kind of sampling, on tensors
    without memory."""
    batch, runner = make_runner(settings, config, torch.bfloat16)
    rng, limits = random.Random(seed), batch.limits
    scheduler = HandScheduler(20_000, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens, seed)
    for number in range(num_sequences):
        length = min(longest, round(rng.expovariate(4 / longest)) + 1) if number < num_sequences - 1 else longest
        scheduler.add([1] * length, rng.randint(1, 12), **rng.choice(PARAMS))
    adapters = runner.adapters
    while (plan := scheduler.plan()) is not None:
        work = batch.apply(plan)
        with nullcontext() if adapters is None or not rng.randrange(3) else adapters.assumed():
            runner.run(work)
        ends = work.length_ended.astype(np.int32)
        tokens = np.zeros(len(ends), np.int32)
        result: Any = SimpleNamespace(
            sequence_ids=work.sequence_ids, token_ids=tokens, token_indexes=work.indexes, ends=ends
        )
        scheduler.process(result)


def source_of(compile_kernel: Callable[[], Any]) -> Any:
    """What Triton would compile."""
    return inspect.getclosurevars(compile_kernel).nonlocals["src"]


def main() -> None:
    folder, given = sys.argv[1:]
    settings = Settings(model=folder, **json.loads(given))
    config = rank_config(ModelConfig.load(Path(folder)), settings)
    recorded: list[Callable[[], Any]] = []
    keys = record(settings, config, H200, recorded.append)
    unforeseen: list[str] = []
    longest_prompt = (settings.max_model_len or 0) - 16
    with torch.inference_mode(), Recorder(keys, lambda kernel: unforeseen.append(source_of(kernel).name)):
        for num_sequences, longest, seed in ((1, 100, 1), (300, 40, 2), (40, 1000, 3), (3, longest_prompt, 4)):
            run_workload(settings, config, num_sequences, longest, seed)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    smallest = min(recorded, key=lambda kernel: len(source_of(kernel).fn.src))
    for _ in range(2):
        smallest()
    names = sorted(source_of(kernel).name for kernel in recorded)
    print(json.dumps({"recorded": names, "unforeseen": unforeseen, "hits": hits}))


if __name__ == "__main__":
    main()
