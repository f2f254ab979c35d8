"""Drafts in bfloat16 without ``--deterministic``: a token differs only where rounding decides; how often is counted.

Logits of several tokens at once are computed by other kernels than those of one, as those of another batch size are. So
the measure of rounding is an engine without drafts: prompts answered alone, and beside each other. Where an engine with
drafts first says another token, its token must have been as likely as the other up to this rounding. ``-s`` shows the
counts. Runs on a bare GPU host as ``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.scheduler.core.lifecycle import SEQUENCE_IDS
from tests.actors.executor.speculation.checks import accepted, guess_by
from tests.actors.executor.speculation.drafters import oracle
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, make_golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
TINY = ("qwen3", "gemma3", "gpt-oss", "llama4", "mixtral", "deepseek-v3")
LARGE = ("llama8b", "qwen06b")
"""Of the published shapes, but of few layers, and without weights."""
WIDER = 30.0
"""What weights of those are multiplied by, which are a thousandth at most: as large as trained ones, they round as
those do."""
NUM_PROMPTS, NUM_TOKENS, LAYERS, TOPS = 24, 64, 4, 20
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": NUM_PROMPTS, "swap_space": 0,
    "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 600,
}  # fmt: skip
ROUNDING = 3.0
"""So many times as far as in an engine without drafts a log probability may move: both are the farthest of a few
thousand, and differ by chance."""
UNIT = 2.0**-8
"""By how much of itself a number in bfloat16 differs from the next: the least that is called rounding here."""

Scores = dict[int, float]


@dataclass
class Answers:
    """By prompt: its tokens, and behind each place the likeliest tokens with their log probabilities."""

    tokens: list[list[int]] = field(default_factory=list)
    scores: list[list[Scores]] = field(default_factory=list)


def make(folder: Path, name: str) -> Path:
    if name not in LARGE:
        family = next(each for each in FAMILIES if name in each.golden)
        return make_golden(folder, family.model_type, family.golden[name])
    path = write_model_folder(name, folder / "model")
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.inference_mode()
def widen(driver: Driver) -> None:
    """Matrices; norms have weights of 1."""
    for tensor in driver.engine._loaded.runner.model.parameters.tensors:
        if tensor.dim() == 2:
            tensor.mul_(WIDER)
        else:
            tensor.fill_(1.0)


@pytest.fixture(scope="module", params=[*TINY, *LARGE])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Driver, Driver]]:
    folder = make(tmp_path_factory.mktemp("model"), request.param)
    given = SETTINGS | ({"load_format": "dummy"} if request.param in LARGE else {})
    both = []
    for lookup in ({"spec_method": "none"}, {"spec_method": "ngram", "spec_tokens": 4}):
        both.append(driver := Driver(folder, **given, **lookup))
        driver.synchronize()
        if request.param in LARGE:
            widen(driver)
    yield request.param, *both
    for driver in both:
        driver.close()


def prompts_of(name: str) -> list[list[int]]:
    rng, vocab = random.Random(name), SHAPES[name]["vocab_size"] if name in LARGE else DEFAULTS["vocab_size"]
    return [[rng.randrange(vocab) for _ in range(rng.choice((2, 15, 16, 33, 100)))] for _ in range(NUM_PROMPTS)]


def ask(driver: Driver, prompts: list[list[int]]) -> tuple[Answers, int]:
    """All prompts beside each other, greedily, and how many drafts were accepted."""
    core = CoreDriver(driver, enable_prefix_caching=False)
    core.ignore_times()
    for number, prompt in enumerate(prompts):
        core.send(str(number), prompt, NUM_TOKENS, {"logprobs": TOPS})
    core.run()
    tops: dict[tuple[int, int], Scores] = {}
    for result in core.results:
        ends, values = np.cumsum(result.top_counts), result.top_bits.view(np.float32)
        for place, row in enumerate(result.logprob_rows.tolist()):
            those = slice(ends[place] - result.top_counts[place], ends[place])
            key = int(result.sequence_ids[row]) % SEQUENCE_IDS, int(result.token_indexes[row])
            tops[key] = dict(zip(result.top_ids[those].tolist(), values[those].tolist(), strict=True))
    sequences = sorted({sequence for sequence, _ in tops})
    scores = [[tops[sequence, index] for index in range(NUM_TOKENS)] for sequence in sequences]
    return Answers([answer.tokens for answer in core.answers.values()], scores), accepted(core)


def ask_alone(driver: Driver, prompts: list[list[int]]) -> Answers:
    """One prompt after the other."""
    alone = Answers()
    for prompt in prompts:
        one, _ = ask(driver, [prompt])
        alone.tokens += one.tokens
        alone.scores += one.scores
    return alone


def first_difference(one: list[int], other: list[int]) -> int:
    """Where they part; their length if they do not."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@dataclass
class Compared:
    """Two runs: tokens behind equal texts, how far log probabilities moved there at most, and what parted them: how
    much likelier the one's token was to it than the other's."""

    tokens: int = 0
    moved: float = 0.0
    gaps: list[float] = field(default_factory=list)


def compare(one: Answers, other: Answers) -> Compared:
    compared = Compared()
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        end = first_difference(a, b)
        compared.tokens += min(end + 1, NUM_TOKENS)
        for index in range(min(end + 1, NUM_TOKENS)):
            mine, theirs = one.scores[place][index], other.scores[place][index]
            both = [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
            compared.moved = max([compared.moved, *both])
        if end < NUM_TOKENS:
            scores = one.scores[place][end]
            compared.gaps.append(scores[a[end]] - scores.get(b[end], float("-inf")))
    return compared


def test_differences_are_ties(engines: tuple[str, Driver, Driver]) -> None:
    """With drafts of which one in four is wrong, and with those that are looked up."""
    name, plain, drafting = engines
    prompts = prompts_of(name)
    expected, _ = ask(plain, prompts)
    rounding = compare(expected, ask_alone(plain, prompts))
    guesses: dict[str, Callable[[list[int], int], list[int]] | None] = {
        "one in four wrong": oracle(
            [prompt + tokens for prompt, tokens in zip(prompts, expected.tokens, strict=True)], 0.25
        ),
        "looked up": None,
    }
    print(f"\n{name}: alone and beside others: {told(rounding)}")
    unit = max(rounding.moved, UNIT)
    for kind, guess in guesses.items():
        guess_by(drafting, guess)
        found, right = ask(drafting, prompts)
        compared = compare(expected, found)
        print(f"{name}: without drafts and with, {kind}, {right} accepted: {told(compared)}")
        assert guess is None or right > 2 * len(prompts)
        assert compared.moved <= ROUNDING * unit
        assert all(gap <= 2 * max(compared.moved, unit) for gap in compared.gaps)


def told(compared: Compared) -> str:
    gaps = ", ".join(f"{gap:.2g}" for gap in sorted(compared.gaps, reverse=True)[:5])
    return (
        f"{compared.tokens} tokens behind equal texts, {len(compared.gaps)} differ, log probabilities moved by "
        f"{compared.moved:.2g} at most, gaps of the tokens that differ: {gaps or 'none'}"
    )
