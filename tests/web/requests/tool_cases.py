"""Tools, a call of one as a model writes it, and a model that is served with both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import parse_chat
from pagebus.web.requests.parsed_request import ParsedRequest
from tests.web.fake_backend import MODEL

NULLS = {"annotations": None, "audio": None, "function_call": None}


SERVED = replace(MODEL, auto_tools=True, tool_parser="hermes", reasoning_parser="qwen3")


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}


CLOCK = {"type": "function", "function": {"name": "clock"}}


CALL = '<think>hm</think>Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


PATH = "/v1/chat/completions"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(model=SERVED, **body: Any) -> ParsedRequest:
    return parse_chat({"messages": [user("x")], **body}, model)


def refused(model=SERVED, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(model, **body)
    return caught.value
