"""Steps that are padded for CUDA graphs, and steps in pieces, on a CPU: what the graphs hold is computed instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.graphs.piecewise_graphs import LaunchedPieces, Pieces
from pagebus.bus.messages import StepResult
from tests.actors.executor.eager_graphs import EagerGraphs, computed_pieces, use_eager_graphs
from tests.actors.executor.small_engine import MAX_TOKENS, outputs
from tests.helpers.engine_driver import Driver

pytestmark = pytest.mark.share(6)


@pytest.fixture
def padded(driver: Driver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EagerGraphs:
    """The driver's engine runs padded steps of up to 6 rows and 40 tokens, with decodes apart unless told otherwise."""
    apart = getattr(request, "param", True)
    monkeypatch.setattr(driver.engine._loaded.batch, "_decodes_apart", apart)
    return use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, decodes_apart=apart))


@pytest.mark.parametrize(("budget", "padded"), [(3, True), (16, True), (24, False), (40, True)], indirect=["padded"])
def test_padded_steps_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int
) -> None:
    """What a CUDA graph computes for a bucket is right for the decodes and prompts it is padded from."""
    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert {bucket.spans > 0 for bucket in padded.replayed} == {True, budget == 24}


def test_padded_steps_of_few_tokens_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind any past here; without decodes, and with them."""
    runner = driver.engine._loaded.runner
    monkeypatch.setattr("pagebus.actors.executor.batch.buckets.FEW_PAST", 0)
    monkeypatch.setitem(runner._configs, True, runner._configs[False])
    graphs = use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, packs_few=True))

    assert outputs(driver, driver.scheduler(16), prompts) == expected
    assert {bucket.decodes for bucket in graphs.replayed if bucket.long_past} == {False, True}


def test_padded_steps_with_extras_and_scores_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """Rows that are sampled again, log probabilities of outputs and of prompts, beside plain rows."""

    def run() -> list[tuple[list[int], list[float]]]:
        scheduler, bits = driver.scheduler(24), {}
        kinds: list[dict[str, Any]] = [
            {}, {"logit_bias": {7: 3.0}, "temperature": 0.5, "top_k": 9}, {"logprobs": 2}, {"prompt_logprobs": 1}
        ]  # fmt: skip
        crowd = [scheduler.add(prompt, MAX_TOKENS, **kinds[i % 4]) for i, prompt in enumerate(prompts)]

        def collect(result: StepResult) -> None:
            for row, value in zip(
                result.logprob_rows.tolist(), result.logprob_bits.view(np.float32).tolist(), strict=True
            ):
                bits.setdefault(int(result.sequence_ids[row]), []).append(value)

        driver.drive(scheduler, on_result=collect)
        return [(sequence.output, bits.get(sequence.sequence_id, [])) for sequence in crowd]

    plain = run()
    graphs = request.getfixturevalue("padded")
    again = run()

    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in plain]
    for (_, scores), (_, wanted) in zip(again, plain, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-4)
    assert any(bucket.spans for bucket in graphs.replayed)


def test_steps_that_pool_last_tokens_run_from_graphs(
    driver: Driver, prompts: list[list[int]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows that pool nothing; the states are those of steps without graphs."""

    def run() -> dict[int, list[float]]:
        scheduler, states = driver.scheduler(24), {}
        for number, prompt in enumerate(prompts):
            asked = {} if number % 3 == 0 else {"pooled_from": len(prompt) - 1}
            scheduler.add(prompt, 1, **asked)

        def collect(result: StepResult) -> None:
            rows = result.pooled_bits.view(np.float32).reshape(len(result.pooled_sequence_ids) or 1, -1)
            states.update(zip(result.pooled_sequence_ids.tolist(), rows.tolist(), strict=False))

        driver.drive(scheduler, on_result=collect)
        return states

    plain = run()
    graphs = request.getfixturevalue("padded")
    with monkeypatch.context() as patched:
        patched.setattr(graphs.runner, "forward", None)
        found = run()

    assert len(plain) == sum(number % 3 > 0 for number in range(len(prompts)))
    assert found.keys() == plain.keys()
    for sequence, states in plain.items():
        assert found[sequence] == pytest.approx(states, abs=1e-4)
    assert graphs.replayed


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"repetition_penalty": 1.3, "temperature": 0.9, "presence_penalty": 0.5},
    {"logit_bias": {11: 4.0, 12: -3.0}, "min_tokens": 5, "end_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 300, 2))},
    {"bad_words_token_ids": ((7,), (9, 4), (12, 200, 31))},
]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[2:3], KINDS[:1] + KINDS[5:6]])
def test_rows_sampled_again_behind_a_graph_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, kinds: list[dict[str, Any]], apart: bool
) -> None:
    """Whatever rows ask for, beside rows that ask for less; in slots where others asked for more before."""

    def run() -> list[list[int]]:
        scheduler = driver.scheduler(24)
        crowd = [
            scheduler.add(prompt, MAX_TOKENS, seed=i, **kinds[i % len(kinds)]) for i, prompt in enumerate(prompts * 2)
        ]
        driver.drive(scheduler)
        return [sequence.output for sequence in crowd]

    plain = run()
    monkeypatch.setattr(driver.engine._loaded.batch, "_decodes_apart", apart)
    graphs = use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, decodes_apart=apart))

    assert run() == plain
    assert graphs.resampled
    assert {each.bucket for each in graphs.resampled} <= graphs.replayed


def test_logits_that_are_scored_are_left_alone(driver: Driver, prompts: list[list[int]], padded: EagerGraphs) -> None:
    """A graph samples from them in place: steps with scores do without."""
    scheduler = driver.scheduler(24)
    for prompt in prompts[:4]:
        scheduler.add(prompt, MAX_TOKENS, logprobs=1, logit_bias={7: 3.0})

    driver.drive(scheduler)

    assert padded.replayed
    assert not padded.resampled


class EagerPieces(EagerGraphs):
    """Runs every step with prompts in pieces, padded to ``SIZE`` tokens: each is computed where its graph would be."""

    SIZE = 64

    def bucket(self, work: StepWork, *, adapted: bool = False) -> Bucket | None:
        return None if work.decode_only else Bucket(0, self.SIZE, pieces=True)

    def pieces(self, bucket: Bucket) -> Pieces:
        self.replayed.add(bucket)
        return computed_pieces(self.runner, bucket.tokens)


@pytest.mark.parametrize("budget", [5, 17, 64])
def test_steps_in_pieces_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What lies between attentions may be padded, with garbage behind the tokens of rows of any kind."""
    runner = driver.engine._loaded.runner
    pieces = EagerPieces(runner.buckets, runner)
    monkeypatch.setattr(runner, "graphs", pieces)

    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert pieces.replayed == {Bucket(0, pieces.SIZE, pieces=True)}


class UncapturedPieces(EagerPieces):
    """Has no graphs of them yet."""

    def pieces(self, bucket: Bucket) -> Pieces:
        self.replayed.add(bucket)
        return LaunchedPieces(bucket.tokens)


def test_pieces_without_graphs_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Padded alike, kernel by kernel."""
    runner = driver.engine._loaded.runner
    pieces = UncapturedPieces(runner.buckets, runner)
    monkeypatch.setattr(runner, "graphs", pieces)

    assert outputs(driver, driver.scheduler(17), prompts) == expected
    assert pieces.replayed
