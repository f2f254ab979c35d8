"""What the tests of the actor share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_factory import byte_level, model_folder

from actors.settings import Settings
from tests.actors.detokenizer.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=str(model_folder(tmp_path, byte_level())))
