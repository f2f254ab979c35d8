"""What the messages of refusals tell people to do."""

from __future__ import annotations

import pytest

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import parse_chat
from pagebus.web.requests.served_model import ServedModel

MODEL = ServedModel(names=("m",), vocab_size=100, max_model_len=64)
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_token": 5}, "max_token: unknown field; did you mean max_tokens?"),
        ({"Temperature": 0}, "Temperature: unknown field; did you mean temperature?"),
        ({"users": "a"}, "users: unknown field; did you mean user?"),
        (
            {"xyz": 5},
            "xyz: unknown field; leave it out, or have the server ignore such fields (--allow-unknown-fields)",
        ),
        ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood: unknown field; leave it out"),
        (
            {"messages": [{"role": "function", "content": "x"}]},
            "messages[0].role: 'function' is not supported: use tool",
        ),
        ({"verbosity": "low"}, 'verbosity: not supported; leave it out or give "medium"'),
        ({"functions": [{}]}, "functions: not supported; leave it out or give []"),
        ({"user": 5}, "user: must be a string of at most 256 characters"),
        ({"store": True}, "store: must be false: chats are not kept, answers of /v1/responses are"),
        ({"service_tier": "flex"}, "service_tier: must be 'auto' or 'default': there is one tier"),
        (
            {"metadata": {"a": 1}},
            "metadata: must hold at most 16 texts of at most 512 characters, with names of at most 64",
        ),
        ({"model": "x"}, "The model `x` does not exist. GET /v1/models lists those that do."),
        ({"seed": 1e30}, "seed: must be an integer of 64 bits, got 1e+30"),
        ({"max_tokens": 2.5}, "max_tokens: must be an integer, got a number"),
    ],
)
def test_messages_say_what_to_do(body, message):
    """Whoever reads them knows what is wrong, and what would be right."""
    with pytest.raises(ApiError) as caught:
        parse_chat({"messages": [USER], **body}, MODEL)
    assert caught.value.message == message
