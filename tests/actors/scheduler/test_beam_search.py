"""The choice among beams: transformers' own, given a model's log probabilities."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.scheduler.beam_search import BeamSearch, Hypothesis, peak_blocks
from pagebus.bus.messages import END_LENGTH, END_STOP
from tests.helpers.beam_reference import reference_beams
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference

CONFIGS = {config.arch: config for config in REFERENCE_CONFIGS}
ENDS = tuple(range(0, 300, 7))
"""So many that random models often reach one."""


@pytest.fixture(scope="module", params=["llama2", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_reference(make_reference(folder, CONFIGS[request.param]))


def search_with(model: Any, prompt: list[int], search: BeamSearch, count: int) -> list[Hypothesis]:
    """The search over the model's log probabilities, every beam computed from its first token."""
    while not search.done:
        tokens = torch.tensor([prompt + beam for beam in search.running().tolist()])
        with torch.inference_mode():
            logprobs = model(tokens).logits[:, -1].float().log_softmax(1)
        top = logprobs.topk(search.num_candidates)
        search.choose(top.indices.int().numpy(), top.values.numpy().view(np.int32))
    return search.best(count)


@pytest.mark.parametrize(
    ("width", "ends", "min_tokens", "length_penalty", "early_stopping"),
    [
        (2, ENDS, 0, 1.0, False),
        (6, ENDS, 4, 0.0, False),
        (3, ENDS[:5], 0, 2.5, False),
        (5, ENDS, 0, -1.0, True),
        (3, ENDS, 2, 1.0, "never"),
        (4, (), 0, 1.0, True),
    ],
)
def test_equals_transformers(
    model: Any, width: int, ends: tuple[int, ...], min_tokens: int, length_penalty: float, early_stopping: bool | str
) -> None:
    """Tokens, scores and order of all beams, whatever ends them."""
    rng = random.Random(width)
    prompt = [rng.randrange(307) for _ in range(rng.randint(1, 20))]
    options: dict[str, Any] = {
        "min_tokens": min_tokens,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    found = search_with(model, prompt, BeamSearch(width, 14, ends, **options), width)
    expected = reference_beams(model, prompt, width, 14, ends, **options)
    assert [each.tokens.tolist() for each in found] == [tokens for tokens, _ in expected]
    assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-5)
    assert all((each.end == END_STOP) == (each.tokens[-1] in ends) for each in found)


def columns(*rows: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of each beam, most likely first."""
    pairs = [sorted(row.items(), key=lambda pair: -pair[1]) for row in rows]
    ids = np.array([[token for token, _ in row] for row in pairs], np.int32)
    return ids, np.array([[value for _, value in row] for row in pairs], np.float32).view(np.int32)


def test_reports_each_tokens_own_alternatives() -> None:
    """Also where beams crossed: alternatives are those of the beam that the token continued."""
    search = BeamSearch(2, 2, num_top=1)
    chosen = search.choose(*columns({5: -1.0, 6: -2.0, 7: -9.0}))
    assert chosen is not None
    assert chosen.tokens.tolist() == [5, 6]
    assert search.choose(*columns({1: -5.0, 2: -8.0, 3: -9.0}, {8: -1.0, 9: -2.0, 3: -9.0})) is None
    best = search.best(2)
    assert [each.tokens.tolist() for each in best] == [[6, 8], [6, 9]]
    assert [each.logprob_bits.view(np.float32).tolist() for each in best] == [[-2.0, -1.0], [-2.0, -2.0]]
    assert [each.top_ids.ravel().tolist() for each in best] == [[5, 8], [5, 8]]
    assert best[0].top_bits.view(np.float32).ravel().tolist() == [-1.0, -1.0]
    assert [each.end for each in best] == [END_LENGTH] * 2


def test_an_end_beyond_the_best_is_no_end() -> None:
    """An end token that is not among the best continuations of the step finishes nothing, and nobody goes on."""
    search = BeamSearch(2, 9, end_ids=(4,))
    chosen = search.choose(*columns({1: -1.0, 2: -2.0, 4: -3.0}))
    assert chosen is not None
    assert chosen.tokens.tolist() == [1, 2]
    assert search.best(2) == []


def test_numbers_that_are_none_are_the_least_likely() -> None:
    """A model that computes NaN gets answers all the same, and the search comes to its end."""
    search = BeamSearch(2, 2)
    for _ in range(2):
        beams = len(search.scores)
        search.choose(*columns(*[{1: float("nan"), 2: -1.0, 3: float("-inf")}] * beams))
    assert search.done
    assert search.best(1)[0].tokens[0] == 2


def test_peak_blocks() -> None:
    """The prompt's full blocks count once, its partial one and the output once per beam."""
    assert peak_blocks(32, 33, 4, 16) == 2 + 4
    assert peak_blocks(33, 40, 4, 16) == 2 + 4
    assert peak_blocks(5, 40, 1, 16) == 3
    assert peak_blocks(2048, 2048 + 160, 8, 16) == 128 + 8 * 10
