"""Whatever JSON a client sends: it is understood and fits on the bus, or it is a clean 4xx."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import orjson
from hypothesis import given
from hypothesis import strategies as st

from pagebus.bus.codec import decode, encode
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import (
    HARMLESS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    parse_chat,
    parse_completion,
    parse_json,
)
from pagebus.web.requests.served_model import ServedModel

T = TypeVar("T")
MODEL = ServedModel(names=("m",), vocab_size=100, max_model_len=64)
KNOWN = (
    *("model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"),
    *("stop_token_ids", "ignore_eos", "stream", "stream_options", "priority", "cache_salt", "truncate_prompt_tokens"),
    *("add_special_tokens", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"),
    *UNSUPPORTED_CHAT, *UNSUPPORTED_COMPLETION, *HARMLESS,
)  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.integers(-2, 20)
    | st.floats().filter(math.isfinite)
    | st.text(max_size=8)
)
words = st.sampled_from(["role", "content", "user", "assistant", "text", "type", "include_usage", "5", "m", "x"])
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=6), values, max_size=5)


def attempt(action: Callable[[], T]) -> T | ApiError:
    """The result, or the error that a client may see; any other exception is a bug."""
    try:
        return action()
    except ApiError as error:
        return error


def check(parse, body: dict[str, object]) -> None:
    try:
        raw = orjson.dumps(body)
    except TypeError:  # lone surrogates: no JSON
        return
    asked = attempt(lambda: parse(parse_json(raw), MODEL))
    if isinstance(asked, ApiError):
        assert asked.status in (400, 404)
        assert len(asked.message) < 1000
        orjson.dumps(asked.body())
        return
    for message in asked.messages_for_bus([f"r{i}" for i in range(len(asked.prompts))], "i", 0.0):
        assert decode(encode(message)).sampling == message.sampling


@given(bodies, values)
def test_completions(body, prompt):
    """For ``/v1/completions``."""
    check(parse_completion, {"prompt": prompt, **body})


@given(bodies, st.lists(st.fixed_dictionaries({"role": words, "content": values}), min_size=1, max_size=2) | values)
def test_chats(body, messages):
    """For ``/v1/chat/completions``."""
    check(parse_chat, {"messages": messages, **body})


@given(st.binary(max_size=64))
def test_bytes(body):
    """Bytes that are anything."""
    result = attempt(lambda: parse_json(body))
    assert isinstance(result, dict) or result.status == 400
