"""The small engine, its model and prompts, and what transformers answers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.executor.small_engine import MAX_TOKENS, SETTINGS, make_prompts
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[3])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REFERENCE_CONFIGS[3].vocab_size)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference_generate(folder, prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()
