"""Engines of the stages of a pipeline, together: transformers' tokens, one rank's samples; when one is lost, all end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.bus.messages import StepResult
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.actors.executor.ranks.test_ranks import COUNT, SAMPLED, SMALL, answers
from tests.actors.executor.sampling.test_grammars import LETTERS, PROMPT, SHIPPED, constrained
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.oracle import make_oracle
from tests.helpers.ranks.stage_driver import StageDriver

ONE_WIDE = ("llama-yarn", "qwen2-tied", "gemma2", "cohere2", "gpt-oss", "qwen3-moe", "deepseek-v2", "minicpm3")
TWO_WIDE = ("qwen2", "gpt-oss", "deepseek-v2")


def check_family(name: str, stages: int, width: int, folder: Path) -> None:
    family = next(family for family in FAMILIES if name in family.golden)
    make_golden(folder, family.model_type, family.golden[name])
    prompts = prompts_for(family, name)[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    driver = StageDriver(folder, stages, width, **SMALL)
    got = answers(driver, prompts)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize("name", ONE_WIDE)
def test_two_stages_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Tied heads, windows, sinks, parts that share a norm, experts, latents; prompts in chunks."""
    check_family(name, 2, 1, tmp_path)
