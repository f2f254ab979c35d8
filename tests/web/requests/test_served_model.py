"""What the ingress learns about the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.actors.model.config import SHIPPED_MODEL, ModelConfig, ModelError
from pagebus.actors.settings import Settings
from pagebus.web.requests.served_model import load_served_model, served_names


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("pagebus",)),
        ({"model": "org/model"}, ("org/model",)),
        ({"model": "org/model", "served_model_name": ("a", "b")}, ("a", "b")),
    ],
)
def test_names(settings, names):
    """The names given, else the model as given, else our own."""
    assert served_names(Settings(**settings)) == names


async def test_the_shipped_model():
    """Sizes and sampling defaults come from the model's files."""
    config = ModelConfig.load(SHIPPED_MODEL)

    model = await load_served_model(Settings(), 5)

    assert (model.vocab_size, model.max_model_len) == (config.vocab_size, config.max_position_embeddings)
    assert dict(model.default_sampling) == dict(config.default_sampling) != {}
    assert model.created_s == 5


async def test_no_defaults():
    """With --generation-config vllm the model's sampling defaults are not used."""
    model = await load_served_model(Settings(generation_config="vllm"), 5)

    assert model.default_sampling == {}


@pytest.mark.parametrize(("shape", "given", "parser"), [
    ("gptoss20b", None, "openai_gptoss"), ("gptoss20b", "qwen3", "qwen3"), ("llama8b", None, ""),
])  # fmt: skip
async def test_the_architecture_names_a_reasoning_parser(shape, given, parser, tmp_path: Path):
    """gpt-oss has one format; the setting goes before it."""
    folder = write_model_folder(shape, tmp_path)

    model = await load_served_model(Settings(model=str(folder), reasoning_parser=given), 5)

    assert model.reasoning_parser == parser


async def test_no_model(tmp_path: Path):
    """A folder that is no model is an error that names it."""
    with pytest.raises(ModelError, match=str(tmp_path)):
        await load_served_model(Settings(model=str(tmp_path)), 5)
