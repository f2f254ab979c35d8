"""Outputs that repeat themselves are ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.detokenizer.repetition import RepetitionDetector
from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.bus.messages import (
    END_STOP,
    RepetitionDetection,
    StopSequence,
)
from tests.actors.detokenizer.letters import EOS, reply, rows_of, run, started


def test_an_output_that_repeats_itself_is_ended(sequences: Sequences) -> None:
    """At the token that completes the pattern often enough; what was computed behind it is dropped, and the scheduler
    is told."""
    wanted = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
    sequences.start(started(repetition_detection=wanted))

    output = run(sequences, rows_of("xxabcabcabcabc"))

    assert reply(output) == ("xxabcabcabc", "repetition", "repetition_detected", 11)
    assert output.controls == [StopSequence(request_id="r1", sequence_id=1)]


def test_repetition_counts_only_after_min_tokens(sequences: Sequences) -> None:
    """But tokens before count as part of it; an end token of the model's own wins."""
    wanted = RepetitionDetection(max_pattern_size=1, min_count=2)
    sequences.start(started(1, repetition_detection=wanted, min_tokens=5))
    sequences.start(started(2, repetition_detection=wanted, ingress="in-1"))

    output = run(sequences, [*rows_of("aaaaaaa"), *rows_of("a", sequence_id=2), (2, EOS, 1, END_STOP)])

    assert output.replies["in-0"].num_output_tokens.tolist() == [5]
    assert output.replies["in-1"].finish_reasons == ("stop",)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(0, 3), st.integers(2, 4))
def test_repetition_is_found_where_it_is(tokens: list[int], least: int, more: int, count: int) -> None:
    """As by looking at the end of the output anew after every token."""
    most = least + more
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count))

    for end in range(1, len(tokens) + 1):
        so_far = tokens[:end]
        expected = any(so_far[-size * count :] == so_far[-size:] * count for size in range(least, most + 1))
        assert detector.push(so_far[-1]) == expected
