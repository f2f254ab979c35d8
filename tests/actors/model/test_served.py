"""The table of the families that are served, and the pages that are made from it."""

from __future__ import annotations

from pagebus.actors.model.families.registry import ARCHITECTURES, FAMILIES
from pagebus.actors.model.served import TINY, as_json, markdown_table, served
from tests.helpers.model_factory import DEFAULTS
from tests.served_pages import pages


def test_every_family_has_a_row() -> None:
    """With its architectures, and with what differs from Llama, the first."""
    rows = served()
    assert [row.family for row in rows] == [family.name for family in FAMILIES]
    assert tuple(name for row in rows for name in row.architectures) == ARCHITECTURES
    assert [row.family for row in rows if not row.differs] == [FAMILIES[0].name]


def test_experts_and_windows_are_those_of_the_specs() -> None:
    """Of all layers or of some; chunks are told apart from windows."""
    found = {row.architectures[0]: (row.experts, row.windows) for row in served()}
    assert found["LlamaForCausalLM"] == ("", "")
    assert found["Gemma3ForCausalLM"] == ("", "some layers")
    assert found["MistralForCausalLM"] == ("", "all layers, or none")
    assert found["MixtralForCausalLM"] == ("all layers", "all layers, or none")
    assert found["Qwen2MoeForCausalLM"] == ("some layers, and a shared one", "some layers, or none")
    assert found["Llama4ForCausalLM"] == ("some layers, and a shared one", "chunks in some layers")


def test_tiny_models_are_those_of_the_tests() -> None:
    """So that a row speaks of models that are tested."""
    assert {name: DEFAULTS[name] for name in TINY} == TINY


def test_pages_are_as_the_table_says() -> None:
    """README.md and docs/models.md; ``make models`` writes them."""
    assert {path.name: path.read_text() for path in pages()} == {path.name: text for path, text in pages().items()}


def test_json_has_the_same_rows() -> None:
    """As many as lines of the table below its two of heading."""
    assert len(as_json()) == len(markdown_table().splitlines()) - 2
    assert as_json()[0].keys() == {"family", "architectures", "differs", "experts", "windows"}
