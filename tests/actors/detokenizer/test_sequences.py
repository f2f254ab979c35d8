"""Tokens in, replies out: ends, stop strings, repeats, gaps, failures."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.detokenizer.sequences import Output, Sequences
from pagebus.actors.detokenizer.text import NoTextDecoder, make_decoder
from pagebus.bus.messages import (
    END_GRAMMAR,
    END_LENGTH,
    END_NONE,
    END_STOP,
    AbortRequest,
    RequestFailed,
    SequenceEnded,
    StopSequence,
)
from tests.actors.detokenizer.letters import DECODER, EOS, reply, rows_of, run, started, step
from tests.helpers.tokenizer_factory import byte_level


def test_text_of_a_read_is_one_delta_with_its_counts(sequences: Sequences) -> None:
    """Several steps of one read give one row with everything the ingress needs."""
    sequences.start(started(choice_index=2))
    batch = run(sequences, rows_of("abc")).replies["in-0"]

    assert (
        batch.request_ids, batch.texts, batch.finish_reasons, batch.stop_reasons,
    ) == (("r1",), ("abc",), (None,), (None,))  # fmt: skip
    assert [
        int(column[0])
        for column in (
            batch.choice_indexes, batch.num_output_tokens, batch.num_prompt_tokens, batch.num_cached_tokens,
        )
    ] == [2, 3, 7, 3]  # fmt: skip
    assert sequences.take().replies == {}


def test_each_ingress_gets_one_batch_with_its_own_rows(sequences: Sequences) -> None:
    """Rows never go to another ingress."""
    for sequence_id in range(1, 7):
        sequences.start(started(sequence_id, ingress=f"in-{sequence_id % 2}"))
    sequences.apply(step(*[(i, ord("a") + i, 0, END_NONE) for i in range(1, 7)]))
    replies = sequences.take().replies

    assert {ingress: (batch.request_ids, batch.texts) for ingress, batch in replies.items()} == {
        "in-0": (("r2", "r4", "r6"), ("c", "e", "g")),
        "in-1": (("r1", "r3", "r5"), ("b", "d", "f")),
    }


def test_end_token_is_counted_but_is_no_text(sequences: Sequences) -> None:
    """EOS ends with reason stop and no stop reason."""
    sequences.start(started())
    output = run(sequences, [*rows_of("ab"), (1, EOS, 2, END_STOP)])

    assert reply(output) == ("ab", "stop", None, 3)
    assert len(sequences) == 0


def test_stop_token_is_the_stop_reason_and_shown_only_if_wanted() -> None:
    """A stop_token_ids hit names its id; include_stop_str_in_output keeps its text."""
    for include, text in ((False, "ab"), (True, "abz")):
        sequences = Sequences(DECODER)
        sequences.start(started(stop_token_ids=(ord("z"),), include_stop_str_in_output=include))

        assert (text, "stop", ord("z"), 3) == reply(run(sequences, rows_of("abz", END_STOP)))


def test_length_ends_with_the_last_token_as_text(sequences: Sequences) -> None:
    """The last token of max_tokens counts and shows."""
    sequences.start(started())

    assert reply(run(sequences, rows_of("abc", END_LENGTH))) == ("abc", "length", None, 3)


def test_stop_string_cuts_ends_and_tells_the_scheduler(sequences: Sequences) -> None:
    """Text before the match, tokens up to it, one StopSequence, nothing afterwards."""
    sequences.start(started(stop=("<<>>",)))
    output = run(sequences, rows_of("ab<<>>cd", END_LENGTH))

    assert reply(output) == ("ab", "stop", "<<>>", 6)
    assert [StopSequence(request_id="r1", sequence_id=1)] == output.controls
    assert Output() == run(sequences, rows_of("ef", first=8))


def test_stop_string_in_the_very_last_token_wins_over_length(sequences: Sequences) -> None:
    """A match at the length limit is a stop."""
    sequences.start(started(stop=("b",)))

    assert reply(run(sequences, rows_of("ab", END_LENGTH))) == ("a", "stop", "b", 2)


@pytest.mark.parametrize(("include", "text"), [(False, "Hell"), (True, "Hello \ufffd")])
def test_a_stop_string_that_the_end_completes_cuts_too(include: bool, text: str) -> None:
    """Half a character becomes text only at the end, as here at the limit."""
    tokenizer = byte_level()
    sequences = Sequences(make_decoder(tokenizer))
    sequences.start(started(stop=("", "o \ufffd"), include_stop_str_in_output=include))
    tokens = [*tokenizer.encode("Hello ").ids, *(tokenizer.token_to_id(each) for each in "ðŁİ")]
    last = len(tokens) - 1
    rows = [(1, token, index, END_LENGTH if index == last else END_NONE) for index, token in enumerate(tokens)]

    assert reply(run(sequences, rows)) == (text, "stop", "o \ufffd", len(tokens))


def test_held_back_text_comes_with_the_end(sequences: Sequences) -> None:
    """The beginning of a stop string that never completed is given out."""
    sequences.start(started(stop=("bcd",)))

    assert reply(run(sequences, rows_of("abc"))) == ("a", None, None, 3)
    assert reply(run(sequences, [(1, EOS, 3, END_STOP)])) == ("bc", "stop", None, 4)


def test_stop_strings_count_only_after_min_tokens(sequences: Sequences) -> None:
    """A match within the first min_tokens tokens is text."""
    sequences.start(started(stop=("b",), min_tokens=2))

    assert reply(run(sequences, rows_of("abab"))) == ("aba", "stop", "b", 4)


@given(text=st.text("ab<", max_size=14), data=st.data())
def test_reads_may_be_cut_anywhere(text: str, data: st.DataObject) -> None:
    """Deltas, ends and counts do not depend on which steps came in which read."""
    stops = data.draw(st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3).map(tuple))
    start = started(stop=stops, min_tokens=data.draw(st.integers(0, 4)))
    rows = rows_of(text, END_LENGTH)
    cut = data.draw(st.integers(0, len(rows)))
    results = []
    for parts in ([rows], [rows[:cut], rows[cut:]], [[row] for row in rows]):
        sequences = Sequences(DECODER)
        sequences.start(start)
        outputs = [run(sequences, part) for part in parts]
        replies = [reply(output) for output in outputs if output.replies]
        controls = [control for output in outputs for control in output.controls]
        results.append(("".join(r[0] for r in replies), replies[-1][1:] if replies else None, controls))

    assert results[0] == results[1] == results[2]


def test_repeated_tokens_are_dropped(sequences: Sequences) -> None:
    """A replica that takes over may repeat tokens that are known."""
    sequences.start(started())
    run(sequences, rows_of("abc"))

    assert reply(run(sequences, rows_of("bcde", first=1))) == ("de", None, None, 5)


def test_tokens_read_before_their_predecessors_wait_for_them(sequences: Sequences) -> None:
    """Two replicas' streams may come in any order within one read, and over reads that were cut short."""
    sequences.start(started())
    for row in rows_of("cd", first=2):
        sequences.apply(step(row))
    sequences.settle(complete=False)
    for row in rows_of("ab"):
        sequences.apply(step(row))
    sequences.settle(complete=True)

    assert reply(sequences.take()) == ("abcd", None, None, 4)


def test_lost_tokens_end_the_request_with_one_error(sequences: Sequences) -> None:
    """A gap fails the whole request once and frees what the scheduler holds."""
    sequences.start(started(1, request_id="r"))
    sequences.start(started(2, request_id="r", choice_index=1))
    output = run(sequences, [(1, 65, 0, END_NONE), (1, 65, 2, END_NONE), (2, 65, 1, END_NONE)])

    assert [(ingress, f.request_id, f.status) for ingress, f in output.failures] == [("in-0", "r", 500)]
    assert [AbortRequest(request_id="r", reason=output.failures[0][1].message)] == output.controls
    assert (output.replies, len(sequences)) == ({}, 0)


def test_a_grammar_that_costs_too_much_is_the_clients_error(sequences: Sequences) -> None:
    """Whether it is found out in a step, or was before the sequence came here. The error names the client's field."""
    sequences.start(started(1, grammar_field="guided_regex"))
    sequences.apply(step((1, 65, 0, END_NONE)))
    sequences.apply(step((1, 66, 1, END_GRAMMAR)))
    sequences.start(started(2, output_token_ids=np.array([65], np.int32), output_end=END_GRAMMAR))
    output = sequences.take()

    failures = [(failure.request_id, failure.status, failure.error_type) for _, failure in output.failures]
    assert failures == [("r1", 400, "BadRequestError"), ("r2", 400, "BadRequestError")]
    assert all("too complex" in failure.message for _, failure in output.failures)
    assert [failure.param for _, failure in output.failures] == ["guided_regex", None]


def test_who_is_given_up_is_named_by_his_attempt(sequences: Sequences) -> None:
    """The scheduler drops a request when all who read it have left, each named by the attempt that it knows him by. A
    later attempt is not meant."""
    sequences.start(started(1, others=("in-1",), attempts=("first", "second")))
    sequences.end(SequenceEnded(sequence_id=1, reason="error", message="no memory"))

    expected = [AbortRequest(request_id="r1", reason="no memory", attempt=each) for each in ("first", "second")]
    assert sequences.take().controls == expected


def test_abort_is_silent_and_error_is_told(sequences: Sequences) -> None:
    """SequenceEnded drops what was not sent yet; only an error has a reply."""
    sequences.start(started(1))
    sequences.start(started(2))
    sequences.apply(step((1, 65, 0, END_NONE), (2, 65, 0, END_NONE)))
    sequences.end(SequenceEnded(sequence_id=1, reason="abort"))
    sequences.end(SequenceEnded(sequence_id=2, reason="error", message="no memory"))
    sequences.end(SequenceEnded(sequence_id=3, reason="error"))
    output = sequences.take()

    assert output.replies == {}
    expected = RequestFailed(request_id="r2", status=500, error_type="InternalServerError", message="no memory")
    assert [("in-0", expected)] == output.failures
    assert len(sequences) == 0


def test_unknown_sequences_and_repeated_starts_change_nothing(sequences: Sequences) -> None:
    """Late tokens of what is over, and a start that was already seen, are ignored."""
    sequences.start(started())
    run(sequences, rows_of("a"))
    sequences.start(started())

    assert reply(run(sequences, [(9, 65, 0, END_NONE), *rows_of("b", first=1)])) == ("b", None, None, 2)


def test_several_tokens_of_one_sequence_in_one_step(sequences: Sequences) -> None:
    """They are taken in order."""
    sequences.start(started())
    sequences.apply(step(*rows_of("abc")))

    assert reply(sequences.take()) == ("abc", None, None, 3)


def test_without_tokenizer_tokens_are_still_counted() -> None:
    """No text, but counts and ends as always."""
    sequences = Sequences(NoTextDecoder())
    sequences.start(started(stop=("a",)))

    assert reply(run(sequences, rows_of("abc", END_LENGTH))) == ("", "length", None, 3)


def test_nothing_is_left_after_many_mixed_sequences(sequences: Sequences) -> None:
    """Every sequence has exactly one end, in whatever way it ends."""
    rng = random.Random(3)
    ends = 0
    for sequence_id in range(1, 300):
        sequences.start(started(sequence_id, stop=("xy",), ingress=f"in-{sequence_id % 3}"))
        text = "".join(rng.choices("abxy", k=20))
        for row in rows_of(text, rng.choice([END_STOP, END_LENGTH]), sequence_id):
            sequences.apply(step(row))
        if rng.random() < 0.3:
            ends += sum(len([r for r in b.finish_reasons if r]) for b in sequences.take().replies.values())
    ends += sum(len([r for r in b.finish_reasons if r]) for b in sequences.take().replies.values())

    assert (ends, len(sequences)) == (299, 0)
    assert not sequences._by_request


@pytest.mark.parametrize(("end", "reason", "text"), [(END_STOP, "stop", "ab"), (END_LENGTH, "length", "abc")])
def test_a_sequence_whose_tokens_come_at_once(sequences: Sequences, end: int, reason: str, text: str) -> None:
    """A beam, or one whose text is made anew: one reply with all of its text, its end and its log probabilities."""
    bits = np.array([-1.0, -2.0, -3.0], np.float32).view(np.int32)
    sequences.start(
        started(
            logprobs=1, output_end=end, output_token_ids=np.array([97, 98, 99], np.int32), output_bits=bits,
            output_top_counts=np.ones(3, np.int32), output_top_ids=np.array([97, 105, 106], np.int32),
            output_top_bits=bits,
        )
    )  # fmt: skip
    output = sequences.take()
    assert reply(output) == (text, reason, None, 3)
    batch = output.replies["in-0"]
    assert batch.token_ids.tolist() == [97, 98, 99]
    assert batch.token_bits.tolist() == batch.top_bits.tolist() == bits.tolist()
    assert batch.top_ids.tolist() == [97, 105, 106]
    assert sequences.take() == Output()
    assert len(sequences) == 0


def test_a_beams_past_is_not_read_from_results(sequences: Sequences) -> None:
    """Results name the beams of a search, which nobody has announced here."""
    assert run(sequences, rows_of("abc", sequence_id=2)) == Output()
    sequences.start(started(output_end=END_STOP, output_token_ids=np.array([120, EOS], np.int32)))
    assert reply(sequences.take()) == ("x", "stop", None, 2)


def test_text_made_anew_says_where_it_begins(sequences: Sequences) -> None:
    """The tokens that a sequence brings along come first, then those of results; offsets count characters."""
    sequences.start(started(output_token_ids=np.array([97, 98], np.int32)))
    assert sequences.take().replies["in-0"].text_offsets.tolist() == [0]
    output = run(sequences, [(1, 99, 2, 0)])
    assert output.replies["in-0"].texts == ("c",)
    assert output.replies["in-0"].text_offsets.tolist() == [2]


def test_a_new_scheduler_voids_everything(sequences: Sequences) -> None:
    """What the old one announced gets no end and no text any more."""
    sequences.start(started())
    sequences.void()
    assert run(sequences, rows_of("abc")) == Output()
    assert len(sequences) == 0


def test_without_text(sequences: Sequences) -> None:
    """Where the client wants none: tokens are told all the same."""
    sequences.start(started(detokenize=False, return_token_ids=True))

    batch = run(sequences, rows_of("abc", END_LENGTH)).replies["in-0"]

    assert (batch.texts, batch.finish_reasons, batch.token_ids.tolist()) == (("",), ("length",), [97, 98, 99])


def test_how_much_text_came_with_each_token(sequences: Sequences) -> None:
    """For clients that want to know, also of text that waits for a stop string; it adds up to the text."""
    sequences.start(started(1, return_text_lengths=True, stop=("bcx",)))
    sequences.start(started(2))

    first = run(sequences, [*rows_of("abc"), *rows_of("z", sequence_id=2)]).replies["in-0"]
    second = run(sequences, rows_of("d", END_LENGTH, first=3)).replies["in-0"]

    assert (first.texts, first.length_counts.tolist(), first.text_lengths.tolist()) == (("a", "z"), [3, 0], [1, 0, 0])
    assert (second.texts, second.length_counts.tolist(), second.text_lengths.tolist()) == (("bcd",), [1], [3])
    sequences.start(started(3))
    assert not len(run(sequences, rows_of("a", sequence_id=3)).replies["in-0"].length_counts)
