"""Turns the chunks of a chat into the events of a response, and builds the final response from them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from pagebus.web.adapters.response_items import read_items, silence
from pagebus.web.adapters.translated import Event
from pagebus.web.http.errors import ApiError

OVER = ("completed", "incomplete", "failed", "cancelled")
"""States of a response that nothing changes any more."""
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's words for the errors of a response by their status; all others are `server_error`."""


def new_response(response_id: str, model: str, shown: dict[str, Any]) -> dict[str, Any]:
    """One that begins; ``shown`` is what it repeats of what was asked."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **shown,
    }


class ResponseEvents:
    """``response`` is what it has become so far; items of its output are open one at a time."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._number = -1
        self._open: tuple[str, int] | None = None
        """Kind of the open item, and which tool call it is."""
        self._end = "completed"
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens that have come since there was text for a message."""

    @property
    def begun(self) -> bool:
        return self._number >= 0

    @property
    def is_over(self) -> bool:
        return self.response["status"] in OVER

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.response["output"][-1]
        return item

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _in_item(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}
        return self._event(kind, **place, **fields)

    def begin(self) -> Iterator[Event]:
        """Before anything is computed."""
        yield self._event("created", response=dict(self.response))
        yield self._event("in_progress", response=dict(self.response))

    def chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        if usage := chunk.get("usage"):
            self.response["usage"] = usage_of(usage)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            self._logprobs += (choice.get("logprobs") or {}).get("content") or []
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                yield from self._text("reasoning", thought)
            if text := delta.get("content"):
                yield from self._text("message", text)
            for call in delta.get("tool_calls") or []:
                yield from self._call(call)
            if choice.get("finish_reason") == "length":
                self._end = "incomplete"
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}

    def end(self) -> Iterator[Event]:
        """It has ended by itself; an item that was open when the tokens ran out is as incomplete as the whole.

        An answer of nothing is an empty message, so that its client can send it back.
        """
        if not self.response["output"]:
            yield from self._begin_text("message")
        yield from self._close(self._end)
        yield self._over(self._end)

    def failed(self, error: ApiError, status: str = "failed") -> Iterator[Event]:
        """It cannot go on; what there is stays."""
        yield from self._close("incomplete")
        if status == "failed":
            code = CODES.get(error.status, "server_error")
            self.response["error"] = {"code": code, "message": error.message}
        yield self._over(status)

    def _over(self, status: str) -> Event:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return self._event(status, response=dict(self.response))

    def follow(self, event: Event) -> None:
        """An event that has been told before, by another one like this: what is told next comes after it."""
        self._number = event["sequence_number"]
        kind, output = event["type"].removeprefix("response."), self.response["output"]
        if kind == "output_item.added":
            output.append(event["item"])
            of_its_kind = sum(item["type"] == event["item"]["type"] for item in output)
            self._open = event["item"]["type"], of_its_kind - 1 if event["item"]["type"] == "function_call" else 0
        elif kind == "output_item.done":
            output[-1], self._open = event["item"], None
        elif kind == "content_part.added":
            self._item["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            self._item["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            part = self._item["content"][0]
            part["text"] += event["delta"]
            if event.get("logprobs"):
                part["logprobs"] += event["logprobs"]
        elif kind in OVER:
            self.response = event["response"]

    # -- items --------------------------------------------------------------------------------------------------------
    def _text(self, kind: str, text: str) -> Iterator[Event]:
        """More of a message or of what is thought before it."""
        if self._open != (kind, 0):
            yield from self._begin_text(kind)
        part, extra = self._item["content"][0], {}
        part["text"] += text
        if kind == "message":
            extra, self._logprobs = {"logprobs": self._logprobs}, []
            part["logprobs"] += extra["logprobs"]
        yield self._in_item(f"{_name(kind)}.delta", content_index=0, delta=text, **extra)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        """A message or what is thought before it, without text so far."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if kind == "reasoning":
            part, item = {"type": "reasoning_text", "text": ""}, {"type": "reasoning", "summary": [], "content": []}
        yield from self._begin(kind, 0, "msg" if kind == "message" else "rs", item)
        begun = {**part, "logprobs": []} if kind == "message" else dict(part)
        yield self._in_item("content_part.added", content_index=0, part=begun)
        self._item["content"].append(part)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """More of a function call."""
        function = call.get("function") or {}
        if self._open != ("function_call", call["index"]):
            item = {"type": "function_call", "call_id": call.get("id"), "name": function.get("name"), "arguments": ""}
            yield from self._begin("function_call", call["index"], "fc", item)
        if arguments := function.get("arguments"):
            self._item["arguments"] += arguments
            yield self._in_item("function_call_arguments.delta", delta=arguments)

    def _begin(self, kind: str, number: int, prefix: str, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = kind, number
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=len(self.response["output"]) - 1, item=_copy(item))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """The open item is complete."""
        if self._open is None:
            return
        kind, item = self._open[0], self._item
        self._open = None
        item["status"] = status
        if kind == "function_call":
            arguments = item["arguments"]
            yield self._in_item("function_call_arguments.done", arguments=arguments, name=item["name"])
        else:
            part, extra = item["content"][0], {}
            if kind == "message":
                part["logprobs"] += self._logprobs
                self._logprobs = []
                extra = {"logprobs": part["logprobs"]}
            yield self._in_item(f"{_name(kind)}.done", content_index=0, text=part["text"], **extra)
            yield self._in_item("content_part.done", content_index=0, part=dict(part))
        yield self._event("output_item.done", output_index=len(self.response["output"]) - 1, item=_copy(item))

    def messages(self) -> list[dict[str, Any]]:
        """What was said, as messages of a chat that goes on: as if its client sent the output back."""
        return read_items(self.response["output"], "output") or [silence()]


def _name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    return {**item, **({"content": [dict(part) for part in item["content"]]} if "content" in item else {})}


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
