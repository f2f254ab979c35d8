"""Drafts of sequences that follow a grammar: whatever is drafted, the outputs are those without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import Tokenizer

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.sampling import followers
from pagebus.actors.model.grammars.grammar import make_matcher
from pagebus.bus.messages import END_GRAMMAR, END_STOP
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.speculation.checks import accepted, guess_by, tokens_of
from tests.actors.executor.speculation.constrained import (
    ADVERSARIES,
    END,
    SCHEMA,
    SHIPPED,
    WANTED,
    asked,
    check,
    drivers,
    drivers_with_draft_model,
    ends_of,
    guess_by_head,
    texts_of,
)
from tests.actors.executor.speculation.drafters import Guess, oracle
from tests.actors.executor.step.test_followers import ABC, TOKEN, VOCABULARY, letters
from tests.actors.scheduler.rests import is_rest, rest_often
from tests.helpers.engine_driver import Driver

pytestmark = pytest.mark.share(6)

TOKENIZER = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    yield from drivers(tmp_path_factory.mktemp("model"), device="cpu", dtype="float32", threads=1)


def test_drafts_are_verified(both: tuple[Driver, Driver]) -> None:
    """Of schemas, expressions and choices beside a free output; what is complete is valid."""
    found = check(both)
    assert accepted(found) > 60
    text = TOKENIZER.decode(found.answers["0"].tokens[:-1], skip_special_tokens=False)
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))


@pytest.mark.parametrize("guess", ADVERSARIES.values(), ids=ADVERSARIES)
def test_a_drafter_that_is_hardly_ever_right(both: tuple[Driver, Driver], guess: Guess) -> None:
    """No output is led astray by masks behind drafts that are wrong, or behind an end."""
    guess_by(both[1], guess)
    assert tokens_of(asked(both[1])) == tokens_of(asked(both[0]))


def test_right_drafts_save_steps(both: tuple[Driver, Driver]) -> None:
    """Most tokens come in runs, up to the end token, which is the last of one."""
    expected = asked(both[0], WANTED[:3])
    guess_by(both[1], oracle(texts_of(expected)))
    found = asked(both[1], WANTED[:3])
    assert tokens_of(found) == tokens_of(expected)
    assert len(found.results) < 0.7 * len(expected.results)
    assert [answer.tokens[-1] for answer in found.answers.values()] == [END] * 3


def test_preempted_sequences_go_on(both: tuple[Driver, Driver]) -> None:
    """What has left the batch with drafts in flight is followed from its accepted tokens."""
    assert check(both, num_blocks=7).preempted


def test_steps_that_do_not_look(both: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of before such a step are none of those behind it."""
    rest_often(monkeypatch)
    plans = check(both).plans
    assert sum(map(is_rest, plans)) > 1


def test_several_choices(both: tuple[Driver, Driver]) -> None:
    """Each draws, drafts and is masked for itself."""
    wanted = [{**WANTED[2], "n": 3}, {**WANTED[0], "n": 2}]
    expected = asked(both[0], wanted)
    guess_by(both[1], oracle(texts_of(expected), 0.25))
    found = asked(both[1], wanted)
    assert tokens_of(found) == tokens_of(expected)
    assert accepted(found) > 20


def test_padded_steps(both: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of runs find their rows where all rows of a padded step are sampled again."""
    expected = asked(both[0])
    guess_by(both[1], oracle(texts_of(expected), 0.25))
    graphs = use_eager_graphs(both[1], monkeypatch, Buckets(8, 64, 4, max_samples=40, max_verified=0))
    assert tokens_of(asked(both[1])) == tokens_of(expected)
    assert any(each.extras.constrained and each.bucket.rows > 8 for each in graphs.resampled)


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    folder = tmp_path_factory.mktemp("model")
    yield from drivers_with_draft_model(folder, device="cpu", dtype="float32", threads=1)


def test_what_a_head_guesses(with_head: tuple[Driver, Driver]) -> None:
    """It comes at the beginning of the step that verifies it, in time for its masks."""
    plain, drafting = with_head
    expected = asked(plain)
    assert tokens_of(asked(drafting)) == tokens_of(expected)
    guess_by_head(drafting, oracle(texts_of(expected), 0.25))
    for limits in ({}, {"num_blocks": 7}):
        found = asked(drafting, **limits)
        assert [answer.tokens for answer in found.answers.values()] == [
            answer.tokens for answer in expected.answers.values()
        ]
        assert accepted(found) > 60
    guess_by_head(drafting, oracle(texts_of(expected)))
    assert len(asked(drafting).results) < 0.8 * len(expected.results)


@pytest.mark.parametrize("guess", ADVERSARIES.values(), ids=ADVERSARIES)
def test_a_head_that_is_hardly_ever_right(with_head: tuple[Driver, Driver], guess: Guess) -> None:
    guess_by_head(with_head[1], guess)
    assert tokens_of(asked(with_head[1])) == tokens_of(asked(with_head[0]))


class Fragile:
    """A matcher that fails at the mask behind so many tokens, as one does that has become too costly."""

    def __init__(self, matcher: Any, most: int, count: int = 0) -> None:
        self._matcher, self._most, self._count = matcher, most, count

    def deep_copy(self) -> Fragile:
        return Fragile(self._matcher.deep_copy(), self._most, self._count)

    def consume_tokens(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens)
        self._count += len(tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._count += (taken := self._matcher.try_consume_tokens(tokens))
        return int(taken)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._matcher.unsafe_compute_mask_ptr(pointer, size)

    def is_error(self) -> bool:
        return self._count >= self._most


def test_the_draft_behind_which_a_grammar_breaks() -> None:
    """Counted, with all tokens before; and the follower goes on, in case that the draft is wrong."""
    drafts = [TOKEN[each] for each in "bcd"]
    masks = torch.zeros((4, -(-VOCABULARY.vocab_size // 32)), dtype=torch.int32)
    for most, broken in ((1, 0), (2, 1), (4, 3), (5, None)):
        start = SimpleNamespace(result=lambda most=most: Fragile(make_matcher(VOCABULARY, ABC), most))
        follower = followers.Follower(0, start, [TOKEN["a"]])  # type: ignore[arg-type]
        assert follower.find_break(drafts, masks) == broken
        assert not follower.matcher.is_error() or broken == 0  # type: ignore[union-attr]
    assert [letters(mask.numpy()) for mask in masks] == [{each, "."} for each in "bcde"]
    start = SimpleNamespace(result=lambda: Fragile(make_matcher(VOCABULARY, ABC), 9))
    follower = followers.Follower(0, start, [TOKEN["a"]])  # type: ignore[arg-type]
    assert follower.find_break([TOKEN["b"], TOKEN["0"], TOKEN["c"]], masks) is None


def test_a_grammar_that_breaks_ends_its_sequence_alone(both: tuple[Driver, Driver]) -> None:
    """It is told by the sequence's end; others go on with their drafts."""
    broken = {"grammar": 'start: "never" unknown'}
    expected = asked(both[0], [WANTED[0], broken])
    guess_by(both[1], oracle(texts_of(expected)))
    found = asked(both[1], [WANTED[0], broken])
    assert [ends_of(core) for core in (expected, found)] == [[END_STOP, END_GRAMMAR]] * 2
