"""Log probabilities through the engine, against transformers' log softmax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.batch.logprob_rows import LogprobSlots, ranges
from pagebus.bus.messages import StepResult
from tests.helpers.engine_driver import Driver, Grown
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference, reference_logits

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 160, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60,
}  # fmt: skip
PROMPTS = [[5], [7, 8], [int(token) for token in np.random.default_rng(1).integers(0, 300, 90)], [9] * 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[3])


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


def floats(bits: np.ndarray) -> list[float]:
    return bits.view(np.float32).tolist()


class Collected:
    """What the results of some steps said, by sequence."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[tuple[float, list[tuple[int, float]]]]] = {}
        self.prompts: dict[int, list[tuple[float, int, list[int]]]] = {}
        self.num_scored = 0

    def take(self, result: StepResult) -> None:
        ends = np.cumsum(result.top_counts)
        for place, row in enumerate(result.logprob_rows.tolist()):
            part = slice(ends[place] - result.top_counts[place], ends[place])
            tops = list(zip(result.top_ids[part].tolist(), floats(result.top_bits[part]), strict=True))
            sequence = int(result.sequence_ids[row])
            self.outputs.setdefault(sequence, []).append((floats(result.logprob_bits)[place], tops))
            self.num_scored += 1
        first = top = 0
        for sequence, start, length, count in zip(
            result.prompt_sequence_ids.tolist(), result.prompt_starts.tolist(), result.prompt_lengths.tolist(),
            result.prompt_top_counts.tolist(), strict=True,
        ):  # fmt: skip
            said = self.prompts.setdefault(sequence, [])
            assert start == len(said) + 1
            for place in range(first, first + length):
                ids = result.prompt_top_ids[top : top + count].tolist()
                said.append((floats(result.prompt_bits)[place], int(result.prompt_ranks[place]), ids))
                top += count
            first += length


@pytest.mark.parametrize("budget", [5, 64])
def test_they_equal_transformers(driver: Driver, folder: Path, budget: int) -> None:
    """Rows that asked for different numbers, or for nothing, prompts in chunks, ends by token with rows in flight."""
    scheduler, collected = driver.scheduler(budget), Collected()
    asked = [(0, None), (3, 0), (20, 2), (None, 20)]
    sequences: list[Grown] = [
        scheduler.add(prompt, 6, logprobs=output, prompt_logprobs=of_prompt, temperature=float(i % 2),
                      end_token_ids=tuple(range(200, 307)), repetition_penalty=1.3, seed=i)
        for i, (prompt, (output, of_prompt)) in enumerate(zip(PROMPTS, asked, strict=True))
    ]  # fmt: skip
    scheduler.add([1, 2, 3], 6)

    driver.drive(scheduler, depth=3, on_result=collected.take)

    for sequence, (output, of_prompt) in zip(sequences, asked, strict=True):
        expected = reference_logits(folder, sequence.prompt + sequence.output).log_softmax(1)
        said = collected.outputs.get(sequence.sequence_id, [])
        assert len(said) == (0 if output is None else len(sequence.output))
        for place, (value, tops) in enumerate(said):
            row = expected[len(sequence.prompt) - 1 + place]
            assert value == pytest.approx(float(row[sequence.output[place]]), abs=1e-4)
            assert [token for token, _ in tops] == row.topk(output or 0).indices.tolist()
            assert [top for _, top in tops] == pytest.approx([float(row[token]) for token, _ in tops], abs=1e-4)
        parts = collected.prompts.get(sequence.sequence_id, [])
        assert len(parts) == (0 if of_prompt is None else len(sequence.prompt) - 1)
        for place, (value, rank, ids) in enumerate(parts):
            row, token = expected[place], sequence.prompt[place + 1]
            assert value == pytest.approx(float(row[token]), abs=1e-4)
            assert rank == int((row > row[token]).sum()) + 1
            assert ids == row.topk(of_prompt or 0).indices.tolist()
    assert collected.num_scored == sum(
        len(sequence.output) for sequence, (output, _) in zip(sequences, asked, strict=True) if output is not None
    )


@pytest.mark.parametrize("budget", [5, 64])
def test_picked_tokens(driver: Driver, folder: Path, budget: int) -> None:
    """Tokens that a client names are reported in place of the most likely ones, in their order, beside rows that asked
    for likely ones or nothing. A slot's next sequence knows nothing of them; ids outside the vocabulary are dropped."""
    scheduler, collected = driver.scheduler(budget), Collected()
    asked: list[tuple[int | None, tuple[int, ...]]] = [
        (0, (5, 299, 0)), (3, ()), (None, ()), (2, (7,)), (0, ()), (0, (11, 10**6)), (0, (3, 4)), (1, ())
    ]  # fmt: skip
    sequences = [
        scheduler.add(PROMPTS[i % 4], 3 + i % 3, logprobs=logprobs, logprob_token_ids=ids)
        for i, (logprobs, ids) in enumerate(asked)
    ]

    driver.drive(scheduler, depth=3, on_result=collected.take)

    for sequence, (logprobs, ids) in zip(sequences, asked, strict=True):
        expected = reference_logits(folder, sequence.prompt + sequence.output).log_softmax(1)
        said = collected.outputs.get(sequence.sequence_id, [])
        assert len(said) == (0 if logprobs is None else len(sequence.output))
        for place, (value, tops) in enumerate(said):
            row = expected[len(sequence.prompt) - 1 + place]
            wanted = [token for token in ids if token < 300] or row.topk(logprobs or 0).indices.tolist()
            assert value == pytest.approx(float(row[sequence.output[place]]), abs=1e-4)
            assert [token for token, _ in tops] == wanted
            assert [top for _, top in tops] == pytest.approx([float(row[token]) for token in wanted], abs=1e-4)


def test_the_whole_vocabulary(driver: Driver, folder: Path) -> None:
    """All tokens, the most likely first, beside a row that asked for fewer."""
    scheduler, collected = driver.scheduler(64), Collected()
    sequences = [scheduler.add(PROMPTS[i], 2, logprobs=logprobs) for i, logprobs in enumerate((10**6, 1))]

    driver.drive(scheduler, depth=2, on_result=collected.take)

    whole, one = (collected.outputs[each.sequence_id] for each in sequences)
    row = reference_logits(folder, sequences[0].prompt + sequences[0].output).log_softmax(1)[len(PROMPTS[0]) - 1]
    values = [value for _, value in whole[0][1]]
    assert sorted(token for token, _ in whole[0][1]) == list(range(len(row)))
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([float(row[token]) for token, _ in whole[0][1]], abs=1e-4)
    assert [len(tops) for _, tops in one] == [1, 1]


@pytest.mark.parametrize("budget", [5, 64])
def test_pooled_states_equal_transformers(driver: Driver, folder: Path, budget: int) -> None:
    """Sums over each step's part of a prompt, of some rows of a batch, from any token on."""
    scheduler = driver.scheduler(budget)
    asked = [0, None, 89, 3]
    sequences = [
        scheduler.add(prompt, 2, pooled_from=first, prompt_logprobs=0 if first == 3 else None)
        for prompt, first in zip(PROMPTS, asked, strict=True)
    ]
    sums: dict[int, dict[int, np.ndarray]] = {}

    def take(result: StepResult) -> None:
        states = result.pooled_bits.view(np.float32).reshape(len(result.pooled_sequence_ids) or 1, -1)
        columns = (result.pooled_sequence_ids, result.pooled_starts, result.pooled_lengths)
        for sequence, start, length, state in zip(*(column.tolist() for column in columns), states, strict=False):
            known = sums.setdefault(sequence, {asked[sequence - 1] or 0: np.zeros_like(state)})
            known[start + length] = known[start] + state

    driver.drive(scheduler, depth=3, on_result=take)

    model = load_reference(folder)
    for sequence, first in zip(sequences, asked, strict=True):
        if first is None:
            assert sequence.sequence_id not in sums
            continue
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([sequence.prompt])).last_hidden_state[0]
        told = sums[sequence.sequence_id][len(sequence.prompt)]
        np.testing.assert_allclose(told, hidden[first:].sum(0).numpy(), atol=1e-3, rtol=1e-4)


def test_steps_without_them_say_nothing(driver: Driver) -> None:
    """Also after a sequence that asked has left its slot."""
    scheduler = driver.scheduler()
    scheduler.add(PROMPTS[2], 3, logprobs=1, prompt_logprobs=1, pooled_from=0)
    driver.drive(scheduler)
    scheduler.add(PROMPTS[2], 3)
    results: list[StepResult] = []

    driver.drive(scheduler, on_result=results.append)

    assert results
    for result in results:
        assert not len(result.logprob_rows)
        assert not len(result.prompt_sequence_ids)
        assert not len(result.pooled_sequence_ids)
    assert driver.engine._loaded.runner.scores is None


def test_ranges() -> None:
    """Consecutive numbers for each pair."""
    starts, counts = np.array([10, 20, 5], np.int32), np.array([2, 3, 0], np.int32)

    assert ranges(starts, counts).tolist() == [10, 11, 20, 21, 22]
    assert [ranges(starts[:1], counts[row : row + 1]).tolist() for row in (0, 1)] == [[10, 11], [10, 11, 12]]
    assert ranges(starts[:1], counts[:1] - counts[:1]).tolist() == []


def test_nothing_is_looked_up_while_nobody_asks() -> None:
    """The common step costs one test of a flag."""
    none = np.empty(0, np.int32)

    assert LogprobSlots(4, 10, 100).rows_of(none, none, none, none, none, none, none, {}) is None
    assert torch.is_inference_mode_enabled() is False
