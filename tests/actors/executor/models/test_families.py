"""Every family that is data, token for token against transformers: whole engines on a CPU, float32, greedy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.rotary import frequencies
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from tests.actors.executor.models.test_models import BLOCK_SIZE, CPU, PagedSequences
from tests.grids import chosen
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, greedy_answers, load_reference, make_golden

GOLDEN = [(family, name) for family in FAMILIES for name in family.golden]
SOME = chosen(GOLDEN, 8, lambda case: (case[0].name, case[1]), first=True)
"""The first model of each family, and some of the others."""
MAX_TOKENS, LONGEST = 24, 300
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 120, "threads": 1,
}  # fmt: skip
MARGIN = 1e-4
"""Of the best logit before the second, by which a token is beyond the rounding of sums."""


def prompts_for(family: Family, name: str) -> list[list[int]]:
    """Of 1, 17, 200 tokens, and of a window and three."""
    rng, window = random.Random(name), family.golden[name].get("sliding_window") or 30
    return [[rng.randrange(DEFAULTS["vocab_size"]) for _ in range(count)] for count in (1, 17, 200, window + 3)]


def reference_tokens(folder: Path, prompts: list[list[int]], count: int = MAX_TOKENS) -> list[list[int]]:
    """Greedy continuations by transformers of up to ``count`` tokens, as far as they leave no doubt."""
    return greedy_answers(load_reference(folder), prompts, count, margin=MARGIN)


def load(folder: Path, num_positions: int = LONGEST) -> Model:
    model = build_model(ModelConfig.load(folder), CPU, torch.float32, Ops.reference(), num_positions)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def after_a_prefix_hit(model: Model, prompt: list[int], length: int) -> list[int]:
    """The prompt computed by one sequence in chunks; another takes its first blocks over and goes on."""
    paged = PagedSequences(model, 2)
    paged.forward([prompt[:50], []])
    paged.forward([prompt[50:], []])
    hit = (len(prompt) - 1) // BLOCK_SIZE
    paged.tables[1, :hit], paged.lens[1] = paged.tables[0, :hit], hit * BLOCK_SIZE
    new, answer = prompt[hit * BLOCK_SIZE :], []
    for _ in range(length):
        answer.append(int(paged.forward([[], new])[1][-1].argmax()))
        new = answer[-1:]
    return answer


@pytest.mark.parametrize(("family", "name"), SOME, ids=[name for _, name in SOME])
def test_greedy_tokens_equal_transformers(family: Family, name: str, tmp_path: Path) -> None:
    """All prompts at once, in chunks of 64 and, for a model of each family, of whole prompts; and behind a prefix that
    another has computed."""
    folder = make_golden(tmp_path, family.model_type, family.golden[name])
    prompts = prompts_for(family, name)
    expected = reference_tokens(folder, prompts)
    assert all(len(answer) >= 20 for answer in expected)
    assert sum(len(set(answer)) > 5 for answer in expected) >= 3

    driver = Driver(folder, **SETTINGS)
    for budget in (64, 512) if name == next(iter(family.golden)) else (64,):
        scheduler = driver.scheduler(budget)
        sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
        driver.drive(scheduler)
        outputs = zip(sequences, expected, strict=True)
        assert [sequence.output[: len(known)] for sequence, known in outputs] == expected, f"budget {budget}"
    driver.close()
    assert after_a_prefix_hit(load(folder), prompts[2], 12) == expected[2][:12]


def whole_logits(folder: Path, ids: list[int], num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last token, ours and transformers'."""
    with torch.inference_mode():
        expected = load_reference(folder)(torch.tensor([ids])).logits[0, -1]
    return PagedSequences(load(folder, num_positions), 1).forward([ids])[0][-1], expected


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_angles_for_long_prompts(kind: str, tmp_path: Path) -> None:
    """Longrope and dynamic scaling go by the longest length of the process: prompts of that length are exact."""
    count = 400
    golden = next(family.golden for family in FAMILIES if family.model_type == kind)
    fields = dict(golden["phi3-long" if kind == "phi3" else "llama-dynamic"])
    if kind == "llama":
        rope = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 8.0}
        fields |= {"max_position_embeddings": 64, "rope_parameters": rope}
    folder = make_golden(tmp_path, kind, fields)
    rng = random.Random(3)
    ids = [rng.randrange(300) for _ in range(count)]

    got, expected = whole_logits(folder, ids, count)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    [rope] = ModelConfig.load(folder).spec.rope
    assert not torch.allclose(frequencies(rope, count), frequencies(rope, 64))


def test_each_family_has_three_models() -> None:
    """And no two models have one name."""
    assert {family.name: len(family.golden) for family in FAMILIES} == dict.fromkeys((f.name for f in FAMILIES), 3)
    assert len({name for _, name in GOLDEN}) == len(GOLDEN)
