"""Reads what a Messages request says about reasoning: whether the model reasons, how much, and what is kept of it."""

from __future__ import annotations

from typing import Any

from pagebus.web.http.errors import bad_field, unsupported_type
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import INT32_MAX, MAX_MESSAGES
from pagebus.web.requests.chat_messages import EFFORTS
from pagebus.web.requests.reasoning import switch_reasoning

KINDS = ("enabled", "adaptive", "disabled")
DISPLAYS = ("summarized", "omitted")
CLEAR_THINKING = "clear_thinking_20251015"


def read_thinking(fields: Fields) -> dict[str, Any]:
    """What ``thinking`` is in a chat. ``adaptive`` leaves it to the model, as a chat that says nothing does."""
    told, given = fields.take("chat_template_kwargs"), fields.object("thinking")
    if given is None:
        return {} if told is None else {"chat_template_kwargs": told}
    thinking = Fields(given, "thinking")
    kind = thinking.string("type", None, choices=KINDS)
    if kind not in KINDS:
        raise bad_field("thinking.type", f"must be one of {', '.join(KINDS)}")
    body: dict[str, Any] = {}
    if kind == "enabled":
        body["thinking_token_budget"] = thinking.integer("budget_tokens", None, 1, INT32_MAX)
        if body["thinking_token_budget"] is None:
            raise bad_field("thinking.budget_tokens", "is required")
    if kind != "disabled":
        display = thinking.string("display", "summarized", choices=DISPLAYS)
        if display not in DISPLAYS:
            raise bad_field("thinking.display", f"must be one of {', '.join(DISPLAYS)}")
        if display == "omitted":
            body["include_reasoning"] = False
    thinking.finish({})
    if kind != "adaptive":
        told = switch_reasoning({} if told is None else told, on=kind == "enabled")
    return body if told is None else {**body, "chat_template_kwargs": told}


def read_effort(output_config: Fields) -> dict[str, Any]:
    """``output_config.effort`` is a chat's ``reasoning_effort``."""
    effort = output_config.string("effort", None, choices=EFFORTS)
    return {} if effort is None else {"reasoning_effort": effort}


def pass_over_cleared_thoughts(fields: Fields) -> None:
    """Take a ``context_management`` that clears thoughts: those before an answer are not shown to the model anyway."""
    given = fields.object("context_management")
    if given is None:
        return
    management = Fields(given, "context_management")
    for index, edit in enumerate(management.array("edits", max_items=MAX_MESSAGES) or []):
        where = f"context_management.edits[{index}]"
        if type(edit) is not dict or edit.get("type") != CLEAR_THINKING:
            raise unsupported_type(where, edit)
        clear = Fields(edit, where)
        clear.string("type", None, choices=(CLEAR_THINKING,))
        clear.take("keep")
        clear.finish({})
    management.finish({})
