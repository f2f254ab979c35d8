"""What an engine pools of prompts, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagebus.bus.messages import StepResult
from tests.helpers.engine_driver import Driver

Prompt = Sequence[int]


def asked(pooling: str, prompt: Prompt) -> dict[str, Any]:
    """Fields of a sequence of which the first token, the last, or the mean is pooled."""
    if pooling == "last":
        return {"pooled_from": len(prompt) - 1}
    return {"pooled_from": 0} | ({"pooled_until": 1} if pooling == "cls" else {})


def pooled(driver: Driver, pooling: str, steps: Sequence[Sequence[Prompt]]) -> list[list[np.ndarray]]:
    """The numbers of each prompt, of steps whose prompts are computed at once and whole."""
    found = []
    for prompts in steps:
        scheduler, numbers = driver.scheduler(), dict[int, np.ndarray]()
        sequences = [scheduler.add(prompt, 1, **asked(pooling, prompt)) for prompt in prompts]

        def collect(result: StepResult, numbers: dict[int, np.ndarray] = numbers) -> None:
            rows = result.pooled_bits.view(np.float32).reshape(len(result.pooled_sequence_ids) or 1, -1)
            assert not numbers.keys() & set(result.pooled_sequence_ids.tolist()), "a prompt was divided"
            numbers.update(zip(result.pooled_sequence_ids.tolist(), rows, strict=False))

        driver.drive(scheduler, on_result=collect)
        found.append([numbers[sequence.sequence_id] for sequence in sequences])
    return found
