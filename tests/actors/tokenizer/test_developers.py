"""The role ``developer``, which OpenAI's newer clients send in the system's place."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.tokenizer.encode import Encoder
from tests.actors.tokenizer.test_encode import LIMITS, ids, tokenizer, user

ROLES = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '; ' }}{% endfor %}"
KNOWS = "{% if messages[0]['role'] == 'developer' %}{% endif %}" + ROLES


def rendered(template: str, *messages: dict[str, Any], **changes: Any) -> str:
    coder = Encoder(tokenizer(), LIMITS, chat_template=template)
    return str(tokenizer().decode(ids(messages, coder=coder, **changes)))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((user("a", "developer"), user("b")), "system: a; user: b; "),
        ((user("b"), user("a", "developer")), "system: a; user: b; "),
        ((user("s", "system"), user("a", "developer"), user("b")), "system: s\n\na; user: b; "),
        ((user("s", "system"), user("b"), user("t", "system")), "system: s; user: b; system: t; "),
    ],
)
def test_they_are_the_system_where_a_template_knows_none(messages: Any, expected: str) -> None:
    """As in vLLM, in one message at the beginning; without any, messages of the system stay where they are."""
    assert rendered(ROLES, *messages) == expected


def test_they_are_themselves_where_a_template_names_them() -> None:
    """So do models that were trained with the role; a client's own template counts as the server's does."""
    messages = user("a", "developer"), user("b")
    assert rendered(KNOWS, *messages) == "developer: a; user: b; "
    assert rendered(ROLES, *messages, chat_template=KNOWS) == "developer: a; user: b; "
