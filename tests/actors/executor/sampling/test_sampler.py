"""Sampling through the engine, against definitions of a few lines on transformers' logits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.model.token_bits import to_bits
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference

MAX_TOKENS = 10
PROMPT = [5, 9, 9, 40, 77, 5, 123, 300, 9]
Rule = Callable[[torch.Tensor, list[int]], None]
"""Changes a row of logits [V] in place, given the output so far."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(
        folder,
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=128,
        max_num_seqs=16,
        num_gpu_blocks_override=130,
    )
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


def greedy(reference: Any, rule: Rule, prompt: list[int] = PROMPT) -> list[int]:
    """What the definition says: all logits, the rule, the largest."""
    output: list[int] = []
    with torch.inference_mode():
        while len(output) < MAX_TOKENS:
            logits = reference(torch.tensor([prompt + output])).logits[0, -1].float()
            rule(logits, output)
            output.append(int(logits.argmax()))
    return output


def run(driver: Driver, *params: dict[str, Any], budget: int = 64, others: int = 0) -> list[list[int]]:
    """Outputs of PROMPT with each of ``params``, all in one batch with ``others`` other sequences."""
    scheduler = driver.scheduler(budget)
    rng = random.Random(others)
    for i in range(others):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 60))]
        scheduler.add(prompt, MAX_TOKENS, temperature=float(i % 2), seed=i)
    sequences = [scheduler.add(PROMPT, MAX_TOKENS, **given) for given in params]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


def nothing(logits: torch.Tensor, output: list[int]) -> None:
    """The plain model."""


def penalties(repetition: float, presence: float, frequency: float) -> Rule:
    def rule(logits: torch.Tensor, output: list[int]) -> None:
        for token in set(PROMPT + output):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token, count in Counter(output).items():
            logits[token] -= frequency * count + presence

    return rule


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.9), (0.6, -2.0, -1.0)]
)
def test_penalties_follow_their_definition(
    driver: Driver, reference: Any, repetition: float, presence: float, frequency: float
) -> None:
    """Repetition over prompt and output, presence and frequency over the output; neighbours keep their own tokens."""
    given = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}

    plain, penalized = run(driver, {}, given, others=3)

    assert penalized == greedy(reference, penalties(repetition, presence, frequency))
    assert plain == greedy(reference, nothing)


def test_min_tokens_bans_end_tokens_until_enough_are_out(driver: Driver, reference: Any) -> None:
    """The ban holds for the first ``min_tokens`` outputs and is gone after them."""
    plain = greedy(reference, nothing)
    banned = (plain[0], plain[3])

    def rule(logits: torch.Tensor, output: list[int]) -> None:
        if len(output) < 4:
            logits[list(banned)] = -torch.inf

    expected = greedy(reference, rule)
    end = next((i for i, token in enumerate(expected) if token in banned), MAX_TOKENS - 1)

    (output,) = run(driver, {"min_tokens": 4, "end_token_ids": banned}, others=2)

    assert output == expected[: end + 1]


def test_logit_bias_is_added_to_its_tokens(driver: Driver, reference: Any) -> None:
    """Also with more entries than the tables held so far, and for as long as the sequence lives."""
    bias = {token: 0.5 * (token % 7) - 1.5 for token in range(0, 300, 3)} | {10**6: 5.0}

    def rule(logits: torch.Tensor, output: list[int]) -> None:
        for token, value in bias.items():
            if token < len(logits):
                logits[token] += value

    small, large, plain = run(driver, {"logit_bias": {17: 100.0}}, {"logit_bias": bias}, {})

    assert small == [17] * MAX_TOKENS
    assert large == greedy(reference, rule)
    assert plain == greedy(reference, nothing)


def test_a_seed_fixes_the_tokens_whatever_else_is_in_the_batch(driver: Driver) -> None:
    """Alone, among others, in other slots and in other chunks: the same; another seed: others."""
    given = {"temperature": 1.2, "seed": 2**41 + 3}

    alone = run(driver, given)
    crowded = run(driver, {"temperature": 0.7, "seed": 5}, given, others=9, budget=7)
    other = run(driver, given | {"seed": 4})

    assert alone[0] == crowded[1]
    assert alone[0] != other[0]


def test_a_seed_may_be_any_integer(driver: Driver) -> None:
    """It is taken modulo 2^64."""
    outputs = run(driver, *({"temperature": 1.0, "seed": seed} for seed in (-1, 2**64 - 1, 2**63, -(2**63))))

    assert outputs[0] == outputs[1]
    assert outputs[2] == outputs[3]


def test_truncation_to_one_token_is_greedy(driver: Driver, reference: Any) -> None:
    """top_k 1, a tiny top_p and min_p 1 each leave the most likely token."""
    limits = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})

    outputs = run(driver, *({"temperature": 1.5, "seed": 3, **limit} for limit in limits), others=2)

    assert outputs == [greedy(reference, nothing)] * 3


def test_top_k_keeps_the_most_likely_tokens(driver: Driver, reference: Any) -> None:
    """Every token sampled is among the three most likely ones, and not always the first."""
    (output,) = run(driver, {"temperature": 5.0, "seed": 1, "top_k": 3}, others=1)

    ranks = []
    with torch.inference_mode():
        for i, token in enumerate(output):
            logits = reference(torch.tensor([PROMPT + output[:i]])).logits[0, -1]
            ranks.append(int((logits > logits[token]).sum()))
    assert max(ranks) <= 2
    assert max(ranks) > 0


def test_truncation_does_not_move_the_noise(driver: Driver) -> None:
    """A limit that keeps every token changes nothing: plain and extra sampling draw the same noise."""
    given = {"temperature": 0.8, "seed": 11}

    plain, limited = run(driver, given, given | {"min_p": 1e-30})

    assert plain == limited


def test_bad_words_are_not_completed(driver: Driver, reference: Any) -> None:
    """The last token of a word is banned where the output ends with its first ones; the prompt does not count."""
    plain = greedy(reference, nothing)
    words = ((plain[0],), (PROMPT[-1], plain[1]), (plain[2], plain[3]), (plain[4], plain[5], plain[6]), (3, 10**6))

    def rule(logits: torch.Tensor, output: list[int]) -> None:
        for *first, last in words:
            if last < len(logits) and (not first or output[-len(first) :] == first):
                logits[last] = -torch.inf

    bad, free, again = run(driver, {"bad_words_token_ids": words}, {}, {"bad_words_token_ids": words[2:3]}, others=2)

    assert bad == greedy(reference, rule)
    assert free == plain
    words = words[2:3]
    assert again == greedy(reference, rule)
    assert run(driver, {}, {}, {}) == [plain] * 3, "slots that others restricted are free again"


def test_only_allowed_tokens_are_sampled(driver: Driver, reference: Any) -> None:
    """Also at random, and beside sequences that may have any token; ids outside the vocabulary are ignored."""
    allowed = tuple(range(3, 300, 7))

    def rule(logits: torch.Tensor, output: list[int]) -> None:
        kept = logits[list(allowed)].clone()
        logits[:] = -torch.inf
        logits[list(allowed)] = kept

    assert run(driver, {"allowed_tokens": to_bits((*allowed, 10**6))}) == run(driver, {"allowed_token_ids": allowed})
    params = {"allowed_token_ids": (*allowed, 10**6)}
    best, drawn, plain = run(driver, params, params | {"temperature": 3.0, "seed": 2}, {"logit_bias": {1: 0.0}})

    assert best == greedy(reference, rule)
    assert set(drawn) <= set(allowed)
    assert plain == greedy(reference, nothing)
    assert run(driver, {"logit_bias": {1: 0.0}}) == [plain], "a slot that was masked is free again"
