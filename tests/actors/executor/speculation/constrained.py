"""Engines with drafts and without, asked for outputs that follow a grammar. Needs no more than an engine does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pagebus.actors.shipped_model
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.model.grammars.grammar import write_grammar
from pagebus.bus.messages import StructuredOutput
from tests.actors.executor.speculation.checks import guess_by, tokens_of
from tests.actors.executor.speculation.drafters import Guess, oracle
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array", "items": {"enum": [1, 20]}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
PROMPT = [370, 71, 72, 370, 71]
END = 4
LETTERS = {"kind": "regex", "text": "([a-z]{3} ){9}[a-z]{3}"}
SMALL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 120,
}  # fmt: skip


def following(**wanted: Any) -> dict[str, Any]:
    """What the sampling of an output that is to be something says."""
    return {"grammar": write_grammar(StructuredOutput(field="test", **wanted)), "ignore_eos": False}


WANTED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3, **following(kind="json", text=json.dumps(SCHEMA))},
    {"temperature": 0.0, **following(**LETTERS)},
    {"temperature": 1.2, "seed": 5, "top_p": 0.9, **following(kind="regex", text="(ab|cd|[0-9]{2}){9,20}")},
    {"temperature": 0.9, "seed": 1, "presence_penalty": 0.5, "logprobs": 2,
     **following(kind="choice", text=json.dumps(["the first of all", "the first of them", "something else"]))},
    {"temperature": 1.0, "seed": 8},
]  # fmt: skip
ADVERSARIES: dict[str, Guess] = {
    "impossible": lambda known, count: [300 + (known[-1] * 7 + place) % 3000 for place in range(count)],
    "ends": lambda known, count: [END] * count,
    "repeating": lambda known, count: [known[-1]] * count,
}


def drivers(folder: Path, **settings: Any) -> Iterator[tuple[Driver, Driver]]:
    """An engine without drafts, and one with, of few weights with the shipped model's tokenizer."""
    config = json.loads((SHIPPED / "config.json").read_text()) | SMALL
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    given = SETTINGS | settings
    both = Driver(folder, **given, spec_method="none"), Driver(folder, **given, spec_method="ngram")
    yield both
    for driver in both:
        driver.close()


def drivers_with_draft_model(folder: Path, **settings: Any) -> Iterator[tuple[Driver, Driver]]:
    """As :func:`drivers`, but the model drafts for itself, until :func:`guess_by_head`."""
    for plain, lookup in drivers(folder, **settings):
        lookup.close()
        model = Driver(folder, **SETTINGS | settings, spec_method="draft_model", spec_model=str(folder), spec_tokens=4)
        yield plain, model
        model.close()


def guess_by_head(driver: Driver, guess: Guess) -> None:
    """In place of what the head guesses, at the beginning of each step that verifies drafts."""
    drafting = driver.engine._loaded.runner.drafting
    assert drafting is not None
    assert drafting.head is not None
    tokens, lengths, count = drafting._state.tokens, drafting.lengths, drafting._num_drafts

    def draft(work: StepWork, graphs: Graphs | None) -> None:
        assert work.runs is not None
        for slot in work.slots[np.diff(work.query_start) > 1].tolist():
            known = tokens[slot, : int(lengths[slot])].tolist()
            drafts = torch.tensor(guess(known, count), dtype=torch.int32, device=tokens.device)
            tokens[slot, len(known) : len(known) + count] = drafts

    drafting.head.draft = draft  # type: ignore[method-assign]


def asked(driver: Driver, wanted: list[dict[str, Any]] = WANTED, **limits: int) -> CoreDriver:
    """Beside each other."""
    core = CoreDriver(driver, limits=limits, preemption_mode="recompute", eos_token_ids=(END,))
    core.ignore_times()
    for number, sampling in enumerate(wanted):
        core.send(str(number), PROMPT, 60, sampling)
    core.run()
    return core


def texts_of(core: CoreDriver) -> list[list[int]]:
    return [PROMPT + tokens for tokens in tokens_of(core)]


def ends_of(core: CoreDriver) -> list[int]:
    """Of each sequence, in the order of their ids."""
    ends = {
        sequence: end
        for result in core.results
        for sequence, end in zip(result.sequence_ids.tolist(), result.ends.tolist(), strict=True)
    }
    return [ends[sequence] for sequence in sorted(ends)]


def check(both: tuple[Driver, Driver], wanted: list[dict[str, Any]] = WANTED, **limits: int) -> CoreDriver:
    """With drafts of which one in four is wrong; the run with drafts is returned."""
    expected = asked(both[0], wanted)
    guess_by(both[1], oracle(texts_of(expected), 0.25))
    found = asked(both[1], wanted, **limits)
    assert [answer.tokens for answer in found.answers.values()] == [
        answer.tokens for answer in expected.answers.values()
    ]
    return found
