"""Where the reasoning is, in a text that comes in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.web.calls.parsing.output import OutputParser, Parsing

TEXTS = [
    ("qwen3", "<think>\nhm, hm</think>\nhm", [[7, 14]]),
    ("qwen3", " <think>a < b </t></think>a < b", [[8, 18]]),
    ("qwen3", "no <think>hm</think>", [[0, 12]]),
    ("deepseek_r1", "hm</think>hm hm", [[0, 2]]),
    ("deepseek_r1", "<think>hm", [[7, 9]]),
    ("qwen3", "<think></think>x", []),
]


@pytest.mark.parametrize(("name", "text", "spans"), TEXTS)
@given(data=st.data())
def test_places(name: str, text: str, spans: list[list[int]], data: st.DataObject) -> None:
    """The same however the text is cut; what is behind the reasoning may look like it."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = OutputParser(Parsing(reasoning=name), "key")

    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parser.deltas(text[begin:end], ended=False)
    parser.deltas("", ended=True)

    assert parser.reasoning_spans == spans


def test_nobody_looks() -> None:
    """Without a parser of reasoning."""
    assert OutputParser(Parsing(), "key").reasoning_spans is None
