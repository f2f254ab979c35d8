"""Requests whose outputs have to be something: schemas, expressions, choices, grammars, calls of tools.

An expression of digits takes any digit anywhere, so that one token too many or too few changes the answer without any
error; in the others it mostly is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.load import Job

EVERY = 3
"""One of so many requests is structured."""
ORDER = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "amount": {"type": "integer", "minimum": 0, "maximum": 99999},
        "state": {"enum": ["open", "closed", "in progress"]},
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4},
    },
    "required": ["code", "amount", "state", "lines"],
    "additionalProperties": False,
}
SUM = 'start: term (("+" | "-") term)*\nterm: /[0-9]{1,4}/ | "(" start ")"\n'
OUTPUTS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}},
    {"structured_outputs": {"regex": "[0-9]{8,13}"}},
    {"structured_outputs": {"grammar": SUM}},
    {"guided_json": {"type": "array", "items": ORDER, "minItems": 2}},
    {"structured_outputs": {"choice": ["the quick brown fox", "the quick brown fox jumps", "你好世界"]}},
    {"response_format": {"type": "json_object"}},
    {"guided_regex": "([a-z]{3,8} ){2,12}[a-z]{3}"},
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Something.", "parameters": ORDER}}
    for name in ("buy", "sell")
]
CALLS: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sell"}}},
)


def structured(jobs: Sequence[Job]) -> list[Job]:
    """The same, but one of ``EVERY`` is to be something; chats by turns also a call."""
    made = list(jobs)
    for number, place in enumerate(range(0, len(made), EVERY)):
        job = made[place]
        wanted = OUTPUTS[number % len(OUTPUTS)]
        if "messages" in job.body and number % 2:
            job, wanted = job.without("logprobs", "top_logprobs"), CALLS[number // 2 % len(CALLS)]
        made[place] = Job(job.path, {**job.body, **wanted})
    return made
