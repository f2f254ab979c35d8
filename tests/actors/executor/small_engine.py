"""A small engine on a CPU, and prompts for it."""

from __future__ import annotations

import random
from typing import Any

from tests.helpers.engine_driver import Driver, HandScheduler

MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 160, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60,
}  # fmt: skip


def make_prompts(vocab_size: int, count: int = 10, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))] for _ in range(count)]


def outputs(driver: Driver, scheduler: HandScheduler, prompts: list[list[int]], depth: int = 2) -> list[list[int]]:
    """What the engine answers all of them, which run beside each other."""
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
    driver.drive(scheduler, depth)
    assert driver.engine.num_occupied_slots == 0
    return [sequence.output for sequence in sequences]
