"""Every family that is data, on CUDA: Triton kernels and CUDA graphs give the tokens of transformers.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/engine/test_families.py``.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from tests.gpu.engine.engine_cases import MAX_TOKENS, SETTINGS, make_prompts
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, load_reference, make_golden, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
GOLDEN = [(family, name) for family in FAMILIES for name in family.golden]
NAMES = [name for _, name in GOLDEN]


def golden(tmp_path: Path, family: Family, name: str, std: float = 0.2) -> Path:
    """The family's tiny model of this name; a GPU host may have a transformers before the family."""
    try:
        return make_golden(tmp_path, family.model_type, family.golden[name], std=std)
    except ValueError as error:
        if "Unrecognized" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} does not know {family.model_type}")


def answers(driver: Driver, prompts: list[list[int]], budget: int) -> list[list[int]]:
    scheduler = driver.scheduler(budget, seed=budget)
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=NAMES)
def test_greedy_tokens_equal_transformers(family: Family, name: str, tmp_path: Path) -> None:
    """Float32: alone and 32 at once, budgets of 16, 64 and 2048 tokens, with graphs and without."""
    folder = golden(tmp_path, family, name)
    prompts = make_prompts(DEFAULTS["vocab_size"], 32, seed=7)
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    driver = Driver(folder, **SETTINGS)
    runner = driver.engine._loaded.runner
    assert runner.graphs is not None

    for budget in (16, 64, 2048):
        assert answers(driver, prompts, budget) == expected, f"budget {budget}"
    assert answers(driver, prompts[:1], 2048) == expected[:1]
    runner.graphs = None
    assert answers(driver, prompts, 2048) == expected, "without graphs"
    driver.close()


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=NAMES)
def test_bfloat16_logits_are_near_float32(
    family: Family, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt's last token and of decodes behind it, over weights as narrow as models begin with: 2%, or as near as
    transformers in bfloat16 where that is farther (2.6% with gemma3-wide)."""
    folder = golden(tmp_path, family, name, std=0.02)
    rng, reference, rounded = random.Random(name), load_reference(folder), load_reference(folder).bfloat16()
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16().float()
    driver = Driver(folder, **SETTINGS | {"dtype": "bfloat16", "enforce_eager": True})
    model, seen = driver.engine._loaded.runner.model, []
    original = model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden)
        seen.append(result[0].float().cpu())
        return result

    monkeypatch.setattr(model, "logits", logits)
    scheduler = driver.scheduler()
    sequence = scheduler.add([rng.randrange(300) for _ in range(100)], 8)
    driver.drive(scheduler, depth=1)
    driver.close()
    tokens = torch.tensor([sequence.prompt + sequence.output[:-1]])
    with torch.inference_mode():
        exact, theirs = (model(tokens).logits[0, 99:].float() for model in (reference, rounded))
    assert len(seen) == len(exact) == 8
    farthest = max(map(distance, theirs, exact))
    assert max(map(distance, seen, exact)) < max(2e-2, 1.25 * farthest)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """As a share of the exact vector's length."""
    return float((got - exact).norm() / exact.norm())
