"""What has arrived of one output of a call, and what of it was taken."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Self

from pagebus.bus.messages import FinishReason
from pagebus.web.calls.answer_details import Token
from pagebus.web.calls.parsing.output import OutputParser


@dataclass(slots=True, eq=False)
class ArrivedOutput:
    """One output. ``texts`` has arrived and was not taken yet. ``index`` is that of the answer."""

    index: int
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    """Characters of text that have arrived, taken or not."""
    num_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    """Times of the first and last arrival of tokens; 0: none yet. ``first_tokens`` arrived first."""
    first_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: list[Token] = field(default_factory=list)
    """Tokens that have arrived and were not taken yet, for calls whose answers show tokens."""
    cumulative_logprob: float = 0.0
    parser: OutputParser | None = None
    """Parses the text, if it may contain more than content."""
    token_starts: array[int] = field(default_factory=lambda: array("i"))
    """The character at which each token begins, for calls that parse reasoning."""
    predicted: tuple[int, int] = (0, 0)
    """Tokens of the prediction that have occurred, and that have not."""

    def parse_by(self, parser: OutputParser) -> None:
        """Parse the text, which may contain more than content."""
        self.parser = parser

    def add_text(self, text: str, offset: int, num_tokens: int) -> None:
        """Add text that begins at character ``offset``; the part that is already known is dropped. With it the choice
        has ``num_tokens``."""
        if num_tokens > self.num_tokens:
            self.num_tokens = num_tokens
        new = text[self.num_chars - offset :] if offset < self.num_chars else text
        if new:
            self.texts.append(new)
            self.num_chars += len(new)

    def add_tokens(self, tokens: list[Token]) -> None:
        """Add tokens, for a call whose answer shows them."""
        self.tokens += tokens
        self.cumulative_logprob += sum(token.logprob or 0.0 for token in tokens)

    def end(self, finish_reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Nothing comes after what has arrived."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def tell_predicted(self, predicted: tuple[int, int]) -> None:
        """Keep how many tokens of the prediction have occurred, and how many have not."""
        self.predicted = predicted

    def add_starts(self, lengths: Sequence[int], offset: int, num_tokens: int) -> None:
        """Record where tokens begin: the last ``len(lengths)`` of ``num_tokens`` tokens have these lengths in
        characters, from ``offset`` on. Tokens that are known already are skipped."""
        known = len(self.token_starts) - (num_tokens - len(lengths))
        for place, length in enumerate(lengths):
            if place >= known:
                self.token_starts.append(offset)
            offset += length

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens in the text parsed so far; None: reasoning is not parsed."""
        spans = None if self.parser is None else self.parser.reasoning_spans
        if spans is None:
            return None
        starts = self.token_starts
        return sum(bisect_left(starts, end) - bisect_left(starts, begin) for begin, end in spans)

    def take_tokens(self) -> list[Token]:
        """The tokens since the last call, once."""
        tokens, self.tokens = self.tokens, []
        return tokens

    @property
    def shown_finish_reason(self) -> str | None:
        """The finish reason that the client sees: ``tool_calls`` if the model stopped after tool calls."""
        calls = self.finish_reason == "stop" and self.parser is not None and self.parser.calls_tools
        return "tool_calls" if calls else self.finish_reason

    def take_text(self) -> str:
        """The text since the last call, once."""
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text

    def take_part(self, num_chars: int, num_tokens: int, *, end_chars: int, end_tokens: int, ended: bool) -> Self:
        """Take only the first ``num_chars`` and ``num_tokens`` of what was not taken yet: the choice as if nothing had
        come behind them, where it has ``end_chars`` and ``end_tokens`` in all, and may have ``ended``."""
        part = copy(self)
        text, tokens = self.take_text(), self.take_tokens()
        part.texts, self.texts = _some(text[:num_chars]), _some(text[num_chars:])
        part.tokens, self.tokens = tokens[:num_tokens], tokens[num_tokens:]
        part.num_chars, part.num_tokens = min(end_chars, self.num_chars), min(end_tokens, self.num_tokens)
        if not ended:
            part.finish_reason = part.stop_reason = None
        return part


def _some(text: str) -> list[str]:
    return [text] if text else []
