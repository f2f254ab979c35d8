"""Parsed output of a choice in OpenAI's shapes: deltas of a stream, the message of a whole answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pagebus.actors.model.reasoning import FORMATS as REASONING_FORMATS
from pagebus.web.calls.parsing.formats import FORCED, FORMATS, HARMONY
from pagebus.web.calls.parsing.harmony import HarmonyParser
from pagebus.web.calls.parsing.reasoning import ReasoningParser
from pagebus.web.calls.parsing.spans import ReasoningSpans
from pagebus.web.calls.parsing.text import CallArguments, CallBegun, Content, Part, Reasoning
from pagebus.web.calls.parsing.tool_calls import ToolCallParser
from pagebus.web.calls.parsing.values import Types

PIECE_CHARS = 4096
"""So much of a whole text is read at once: what looks like a call and is none costs a copy of what is being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """How a call's texts are read. ``reasoning`` and ``tools`` are names of parsers, empty for none; ``named``: the one
    tool whose arguments the text is; ``most_calls``: None for any number. ``types``: of the arguments of each tool, for
    formats that do not say. ``harmony``: the texts are messages with headers, as gpt-oss writes them."""

    reasoning: str = ""
    show_reasoning: bool = True
    tools: str = ""
    names: tuple[str, ...] = ()
    named: str = ""
    most_calls: int | None = None
    types: Mapping[str, Mapping[str, Types]] = field(default_factory=dict)
    harmony: bool = False


class OutputParser:
    """Reads one choice. ``key`` is the same wherever the choice is read again: ids of calls follow from it."""

    def __init__(self, parsing: Parsing, key: str) -> None:
        self._parsing = parsing
        self._key = key
        self._splitter = _splitter(parsing)
        self._spans = ReasoningSpans()
        self._tools = None
        if parsing.tools and parsing.tools != HARMONY:
            self._tools = ToolCallParser(
                FORMATS.get(parsing.tools, FORCED), parsing.names,
                named=parsing.named, most=parsing.most_calls, types=parsing.types,
            )  # fmt: skip

    @property
    def calls_tools(self) -> bool:
        """Whether there has been a call, and not because the client had named the tool."""
        caller = self._splitter if isinstance(self._splitter, HarmonyParser) else None
        num_calls = sum(each.num_calls for each in (self._tools, caller) if each is not None)
        return num_calls > 0 and not self._parsing.named

    @property
    def reasoning_spans(self) -> list[list[int]] | None:
        """From which to which character of what was read so far there was reasoning; None: it is not parsed."""
        return self._spans.spans if self._parsing.reasoning else None

    def deltas(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """What is new with ``text``, and with the end of the output."""
        return [self._delta(part) for part in _joined(self._parts(text, ended=ended))]

    def _parts(self, text: str, *, ended: bool) -> Iterator[Part]:
        found: list[Part] = [Content(text)] if text else []
        if self._splitter is not None:
            self._spans.feed(text)
            found = list(self._splitter.feed(text))
            found += self._splitter.finish() if ended else ()
        for number, part in enumerate(found, 1):
            if isinstance(part, Reasoning):
                self._spans.found(part.text, is_last=number == len(found))
                if self._parsing.show_reasoning and self._parsing.reasoning:
                    yield part
            elif self._tools is not None and isinstance(part, Content):
                yield from self._tools.feed(part.text)
            else:
                yield part
        if ended and self._tools is not None:
            yield from self._tools.finish()

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text, "reasoning": part.text}
        if isinstance(part, CallArguments):
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        return {"tool_calls": [{"index": part.index, **self._call(part, "")}]}

    def _call(self, begun: CallBegun, arguments: str) -> dict[str, Any]:
        function = {"name": begun.name, "arguments": arguments}
        name = begun.id or call_id(self._key, begun.index, self._parsing)
        return {"id": name, "type": "function", "function": function}

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a choice that has ended."""
        content, reasoning = "", ""
        begun: list[CallBegun] = []
        arguments: dict[int, str] = {}
        pieces = [text[begin : begin + PIECE_CHARS] for begin in range(0, len(text), PIECE_CHARS)]
        found = chain.from_iterable(self._parts(piece, ended=False) for piece in pieces)
        for part in chain(found, self._parts("", ended=True)):
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, Reasoning):
                reasoning += part.text
            elif isinstance(part, CallBegun):
                begun.append(part)
            else:
                arguments[part.index] = arguments.get(part.index, "") + part.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._parsing.reasoning and self._parsing.show_reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning or None
        if begun:
            message["content"] = content or None
            message["tool_calls"] = [self._call(each, arguments.get(each.index, "")) for each in begun]
        return message


def _splitter(parsing: Parsing) -> ReasoningParser | HarmonyParser | None:
    """What parts reasoning from the rest."""
    if parsing.harmony:
        return HarmonyParser(calls=parsing.tools == HARMONY, most=parsing.most_calls)
    if not parsing.reasoning:
        return None
    return ReasoningParser(REASONING_FORMATS[parsing.reasoning], calls=parsing.tools in FORMATS)


def call_id(key: str, index: int, parsing: Parsing) -> str:
    """The same for the same call. Mistral's templates want nine letters and digits."""
    digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if parsing.tools == "mistral" else f"call_{digest}"


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours of one kind as one part."""
    last: Part | None = None
    for part in parts:
        if isinstance(last, Content) and isinstance(part, Content):
            last = Content(last.text + part.text)
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            last = Reasoning(last.text + part.text)
        else:
            if last is not None:
                yield last
            last = part
    if last is not None:
        yield last
