"""Tokens, log probabilities and prompts on their way into replies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.actors.detokenizer.text import NoTextDecoder, make_decoder
from pagebus.bus.messages import END_NONE, END_STOP, ReplyBatch, StepResult
from tests.actors.detokenizer.test_sequences import DECODER, started, step
from tests.helpers.tokenizer_factory import byte_level, sentencepiece

INTS = {"dtype": np.int32}


def ints(*values: int) -> np.ndarray:
    return np.array(values, **INTS)


def bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.int32)


def scored(result: StepResult, rows: dict[int, tuple[float, list[int], list[float]]]) -> StepResult:
    """The result with log probabilities for some of its rows."""
    return replace(
        result,
        logprob_rows=ints(*rows),
        logprob_bits=bits(*(value for value, _, _ in rows.values())),
        top_counts=ints(*(len(ids) for _, ids, _ in rows.values())),
        top_ids=ints(*(i for _, ids, _ in rows.values() for i in ids)),
        top_bits=bits(*(value for _, _, values in rows.values() for value in values)),
    )


def prompt_part(sequence_id: int, start: int, num_top: int, *positions: tuple[float, int, list[int]]) -> StepResult:
    """A result that holds a part of a prompt: log probability, rank and alternatives of each position."""
    return replace(
        step(),
        prompt_sequence_ids=ints(sequence_id),
        prompt_starts=ints(start),
        prompt_lengths=ints(len(positions)),
        prompt_top_counts=ints(num_top),
        prompt_bits=bits(*(value for value, _, _ in positions)),
        prompt_ranks=ints(*(rank for _, rank, _ in positions)),
        prompt_top_ids=ints(*(i for _, _, ids in positions for i in ids)),
        prompt_top_bits=bits(*(-0.5 * i for _, _, ids in positions for i in range(len(ids)))),
    )


def only_batch(sequences: Sequences) -> ReplyBatch:
    output = sequences.take()
    assert not output.failures
    return output.replies["in-0"]


def test_tokens_of_those_who_asked() -> None:
    """Three choices in one batch: log probabilities, ids only, nothing; over two steps, held back text or not."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, logprobs=2, stop=("bcx",)))
    sequences.start(started(2, return_token_ids=True))
    sequences.start(started(3))
    a, b, c = (ord(letter) for letter in "abc")
    tops = [a, b]
    sequences.apply(
        scored(step((1, a, 0, END_NONE), (2, b, 0, END_NONE), (3, c, 0, END_NONE)), {0: (-1.5, tops, [-0.5, -1.5])})
    )
    sequences.apply(scored(step((3, c, 1, END_NONE), (1, b, 1, END_NONE)), {1: (-2.5, [], [])}))

    batch = only_batch(sequences)

    assert batch.texts == ("a", "b", "cc")
    assert batch.token_counts.tolist() == [2, 1, 0]
    assert batch.token_ids.tolist() == [a, b, b]
    assert batch.token_bits.view(np.float32).tolist() == [-1.5, -2.5, 0.0]
    assert batch.top_counts.tolist() == [2, 0, -1]
    assert batch.top_ids.tolist() == tops
    assert batch.top_bits.view(np.float32).tolist() == [-0.5, -1.5]
    assert batch.token_texts == {a: "a", b: "b"}
    assert batch.token_bytes == {}
    assert not only_touched(sequences)


def only_touched(sequences: Sequences) -> dict[str, ReplyBatch]:
    return sequences.take().replies


def test_the_end_token_is_told() -> None:
    """It is no text, but a token like any other."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, logprobs=0))
    sequences.apply(scored(step((1, 0, 0, END_STOP)), {0: (-0.25, [], [])}))

    batch = only_batch(sequences)

    assert (batch.texts, batch.finish_reasons) == (("",), ("stop",))
    assert batch.token_ids.tolist() == [0]
    assert batch.token_texts == {0: "<eos>"}


def test_batches_without_tokens_are_as_they_were() -> None:
    """No field is filled for clients that asked for nothing."""
    sequences = Sequences(DECODER)
    sequences.start(started(1))
    sequences.apply(step((1, 97, 0, END_NONE)))

    batch = only_batch(sequences)

    assert [len(column) for column in (batch.token_counts, batch.token_ids, batch.top_counts, batch.token_texts)] == [
        0
    ] * 4


def test_a_prompt_is_told_at_once_without_log_probabilities() -> None:
    """For ids and echo."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, prompt_token_ids=ints(97, 0, 98)))

    ((ingress, reply),) = sequences.take().prompts

    assert (ingress, reply.request_id, reply.text, reply.num_top) == ("in-0", "r1", "ab", None)
    assert reply.token_ids.tolist() == [97, 0, 98]
    assert reply.token_texts == {97: "a", 0: "<eos>", 98: "b"}


def test_a_prompt_is_told_when_all_its_parts_are_there() -> None:
    """Parts that come again, after a preemption or from another executor, count once; then nothing more is said."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, prompt_logprobs=1, prompt_token_ids=ints(97, 98, 99, 100)))
    sequences.apply(prompt_part(1, 1, 1, (-1.0, 1, [98])))
    sequences.apply(prompt_part(1, 3, 1, (-9.0, 9, [9])))  # of a stream whose beginning is missing: ignored
    sequences.apply(prompt_part(1, 1, 1, (-7.0, 7, [7]), (-2.0, 5, [33])))
    assert not sequences.take().prompts
    sequences.apply(prompt_part(1, 2, 1, (-8.0, 8, [8]), (-3.0, 2, [34])))
    sequences.apply(prompt_part(1, 1, 1, (-8.0, 8, [8])))
    sequences.apply(prompt_part(2, 1, 1, (-8.0, 8, [8])))

    ((_, reply),) = sequences.take().prompts

    assert reply.num_top == 1
    assert reply.token_bits.view(np.float32).tolist() == [-1.0, -2.0, -3.0]
    assert reply.ranks.tolist() == [1, 5, 2]
    assert reply.top_ids.tolist() == [98, 33, 34]
    assert set(reply.token_texts) == {97, 98, 99, 100, 33, 34}
    assert not sequences.take().prompts


def test_one_token_has_no_log_probability() -> None:
    """A prompt of one token is complete from the start."""
    sequences = Sequences(DECODER)
    sequences.start(started(1, prompt_logprobs=3, prompt_token_ids=ints(97)))

    assert len(sequences.take().prompts) == 1


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tokens_alone(make: Any) -> None:
    """Every token as text; where that is not all, with its bytes."""
    backend = make()
    decoder = make_decoder(backend)
    for token_id in range(backend.get_vocab_size(with_added_tokens=True)):
        text, exact = decoder.token(token_id)
        assert ("\ufffd" in text and exact is not None) or exact is None or exact.decode() != text
        if exact is None and make is byte_level:
            assert text == backend.decode([token_id], skip_special_tokens=False)
    assert decoder.token(10**6) == ("", None)
    assert NoTextDecoder().token(5) == ("", None)
