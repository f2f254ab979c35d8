"""Tiny models that pool, and what an engine pools of prompts, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pagebus.bus.messages import StepResult
from tests.actors.model.pooling.tiny_models import make_decoder, make_encoder, write_modules
from tests.helpers.engine_driver import Driver

Prompt = Sequence[int]


def write_model(folder: Path, family: str, kind: str, **fields: Any) -> str:
    """A tiny model that pools; a ``kind`` of pooling, ``classes`` of the first token, or ``dense``, a product of the
    mean. Returns what is pooled."""
    if kind == "classes":
        make_encoder(folder, family, classifies=True, num_labels=3, **fields)
        return "cls"
    make = make_decoder if family == "qwen3" else partial(make_encoder, kind=family)
    make(folder, **fields)
    pooling = "mean" if kind == "dense" else kind
    write_modules(folder, pooling, dense=24 if kind == "dense" else 0, hidden=fields.get("hidden_size", 64))
    return pooling


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
            if not len(result.pooled_sequence_ids):
                return
            rows = result.pooled_bits.view(np.float32).reshape(len(result.pooled_sequence_ids), -1)
            assert not numbers.keys() & set(result.pooled_sequence_ids.tolist()), "a prompt was divided"
            means = rows / result.pooled_lengths[:, None]
            numbers.update(zip(result.pooled_sequence_ids.tolist(), means, strict=True))

        driver.drive(scheduler, on_result=collect)
        found.append([numbers[sequence.sequence_id] for sequence in sequences])
    return found
