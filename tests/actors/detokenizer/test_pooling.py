"""Hidden states of prompts on their way into replies."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.bus.messages import END_LENGTH, StepResult
from tests.actors.detokenizer.test_sequences import DECODER, started, step


def part(*rows: tuple[int, int, int, list[float]]) -> StepResult:
    """A result with sums of states: (sequence id, start, length, sum)."""
    ids, starts, lengths, states = zip(*rows, strict=True)
    return replace(
        step(),
        pooled_sequence_ids=np.array(ids, np.int32),
        pooled_starts=np.array(starts, np.int32),
        pooled_lengths=np.array(lengths, np.int32),
        pooled_bits=np.array(states, np.float32).reshape(-1).view(np.int32),
    )


def told(sequences: Sequences) -> dict[str, list[float]]:
    """Request and vector of the prompts that are to be told."""
    prompts = sequences.take().prompts
    assert all(ingress == "in-0" for ingress, _ in prompts)
    return {reply.request_id: reply.pooled_bits.view(np.float32).tolist() for _, reply in prompts}


def test_parts_become_a_mean() -> None:
    """Two prompts of seven tokens in one result; the last state needs no sum. Each is told once, before its end."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, pooled_from=0, max_tokens=1))
    sequences.start(started(2, pooled_from=6, max_tokens=1))
    sequences.start(started(3))

    sequences.apply(part((1, 0, 4, [7.0, 1.0])))
    assert told(sequences) == {}
    sequences.apply(part((2, 6, 1, [5.0, 6.0]), (1, 4, 3, [0.0, 6.0]), (9, 0, 7, [1.0, 1.0])))
    assert told(sequences) == {"r1": [1.0, 1.0], "r2": [5.0, 6.0]}
    sequences.apply(step((1, 97, 0, END_LENGTH)))

    output = sequences.take()
    assert not output.prompts
    assert output.replies["in-0"].finish_reasons == ("length",)


def test_a_prompt_that_is_computed_anew() -> None:
    """In other chunks, from its beginning or from where an older one ended: nothing counts twice."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, pooled_from=0))

    sequences.apply(part((1, 0, 2, [2.0])))
    sequences.apply(part((1, 2, 3, [3.0])))
    sequences.apply(part((1, 0, 3, [3.0])))
    sequences.apply(part((1, 2, 1, [1.0])))
    sequences.apply(part((1, 4, 3, [100.0])))
    assert told(sequences) == {}
    sequences.apply(part((1, 3, 4, [11.0])))

    assert told(sequences) == {"r1": [2.0]}


def test_malformed_columns_are_an_error() -> None:
    """Which costs that result, and is not taken for something else."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, pooled_from=0))
    bad = part((1, 0, 2, [2.0, 1.0]))

    with pytest.raises(ValueError, match="argument"):
        sequences.apply(replace(bad, pooled_starts=np.array([0, 1], np.int32)))
