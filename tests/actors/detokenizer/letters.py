"""A tokenizer of single letters, and steps that spell texts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from pagebus.actors.detokenizer.sequences import Output, Sequences
from pagebus.actors.detokenizer.text import make_decoder
from pagebus.bus.messages import (
    END_NONE,
    SequenceStarted,
    StepResult,
)
from tests.helpers.sampling_fields import gathered

EOS = 0


LETTERS = {"<eos>": EOS} | {chr(i): i for i in range(33, 127)}


def letters() -> Tokenizer:
    """One token per printable ASCII character; 0 is special."""
    tokenizer = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


DECODER = make_decoder(letters())


def started(sequence_id: int = 1, **changes: Any) -> SequenceStarted:
    fields: dict[str, Any] = {
        "request_id": f"r{sequence_id}",
        "sequence_id": sequence_id,
        "choice_index": 0,
        "ingress": "in-0",
        "num_prompt_tokens": 7,
        "num_cached_tokens": 3,
        "max_tokens": 100,
    }
    return SequenceStarted(**gathered(SequenceStarted, fields | changes))


Row = tuple[int, int, int, int]


def step(*rows: Row) -> StepResult:
    """A step of (sequence id, token id, token index, end) rows."""
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    return StepResult(
        step=1, scheduler_epoch=1, received_s=0, launched_s=0, done_s=0, num_computed_tokens=len(rows),
        sequence_ids=columns[0], token_ids=columns[1], token_indexes=columns[2], ends=columns[3],
    )  # fmt: skip


def rows_of(text: str, end: int = END_NONE, sequence_id: int = 1, first: int = 0) -> list[Row]:
    """One row per character; the last one has ``end``."""
    last = len(text) - 1
    return [(sequence_id, ord(c), first + i, end if i == last else END_NONE) for i, c in enumerate(text)]


def run(sequences: Sequences, rows: Sequence[Row]) -> Output:
    """Each row as a step of its own, all in one read."""
    for row in rows:
        sequences.apply(step(row))
    sequences.settle(complete=True)
    return sequences.take()


def reply(output: Output) -> tuple[str, str | None, str | int | None, int]:
    """(text, finish reason, stop reason, output tokens) of the only row."""
    batch = output.replies["in-0"]
    assert len(batch.request_ids) == 1
    return batch.texts[0], batch.finish_reasons[0], batch.stop_reasons[0], int(batch.num_output_tokens[0])
