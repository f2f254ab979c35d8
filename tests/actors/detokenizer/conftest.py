"""What the tests of the actor share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.actors.settings import Settings
from tests.actors.detokenizer.letters import DECODER
from tests.actors.detokenizer.world import World
from tests.helpers.tokenizer_factory import byte_level, model_folder


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=str(model_folder(tmp_path, byte_level())))


@pytest.fixture
def sequences() -> Sequences:
    return Sequences(DECODER)
