"""``--chat-template`` is parsed at the start, not by the first chat."""

from __future__ import annotations

import pytest

from pagebus.actors.model.tokenizer import TokenizerError
from pagebus.actors.tokenizer.chat import ChatTemplate
from tests.actors.tokenizer.test_encode import tokenizer


@pytest.mark.parametrize(
    ("template", "line"),
    [("{% if messages", 1), ("a\n{% for m in messages %}", 2), ("{% generation %}a", 1), ("{{ a }", 1)],
)
def test_a_template_that_cannot_be_parsed(template: str, line: int) -> None:
    """The error names the setting and the line."""
    with pytest.raises(TokenizerError, match=f"^--chat-template, line {line}: [Uu]nexpected"):
        ChatTemplate(tokenizer(), template)


def test_tags_of_transformers_are_known() -> None:
    """Those that it adds to Jinja's own."""
    loop = "{% for m in messages %}{% if m %}{% continue %}{% endif %}{% break %}{% endfor %}"
    ChatTemplate(tokenizer(), loop + "{% generation %}{{ a }}{% endgeneration %}").close()
