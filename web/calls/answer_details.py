"""Details of an answer besides its text: logprobs, token ids, the prompt, and the choices it shows."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages import Int32Array, PromptReply
from pagebus.web.calls.number_formats import DType, Order
from pagebus.web.calls.parsing.output import Parsing
from pagebus.web.calls.pooled_forms import ClassForm, ScoreForm
from pagebus.web.http.limits import MAX_LOGPROB_TOKEN_IDS

Float32Array = NDArray[np.float32]
TOP = struct.Struct("<if")
"""An alternative to a token: its id and log probability. A list of tuples would take 13 times the memory."""
LOWEST = -9999.0
"""Stands for a logprob of minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The form of embeddings: their first ``dimensions`` numbers (None: all), normalized to length 1 or not. They are
    sent as numbers, or as bytes of a number format and byte order: in base64, or as the response body, with or without
    a header that describes it."""

    dimensions: int | None = None
    encoding: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    dtype: DType = "float32"
    order: Order = "native"
    normalize: bool = True

    @property
    def is_body(self) -> bool:
        """Whether the response body is bytes instead of JSON."""
        return self.encoding in ("bytes", "bytes_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDetails:
    """The details that a request asks for.

    ``logprobs``, ``prompt_logprobs``: that many alternatives per token, None for no log probabilities.
    ``num_choices``: how many of a prompt's choices are shown, the most likely ones. ``prompt_only``: no output is.
    """

    num_choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    parsing: Parsing | None = None
    """How outputs are parsed for tool calls and reasoning; None: all text is content."""
    said: str = ""
    """Text that the assistant's message begins with, because the prompt contains it (``echo``)."""
    picked: bool = False
    """The alternatives are the tokens named by the client, all of which are shown."""
    prompt_text: bool = False
    """A chat's answer shows the prompt as the template made it."""
    embedding: EmbeddingForm | None = None
    """The form of embeddings, for calls that return them."""
    score: ScoreForm | None = None
    """The form of scores, for calls that return them."""
    classes: ClassForm | None = None
    """The form of classes, for calls that return them."""


@dataclass(slots=True)
class Token:
    """A token of output or prompt. ``logprob`` is None if it is unknown (the first token of a prompt) or was not
    requested. ``tops`` are its alternatives as :data:`TOP`, the most likely first. ``rank`` is known for prompts
    only."""

    id: int
    logprob: float | None = None
    tops: bytes = b""
    rank: int = 0

    def likeliest(self, count: int) -> Iterator[tuple[int, float]]:
        """Ids and logprobs of the ``count`` most likely alternatives, or of all if there are fewer."""
        return TOP.iter_unpack(self.tops[: TOP.size * count])


@dataclass(slots=True)
class TokenTexts:
    """The tokens of one call as text, and as bytes where text cannot express them."""

    texts: dict[int, str] = field(default_factory=dict)
    data: dict[int, str] = field(default_factory=dict)

    def add(self, texts: Mapping[int, str], data: Mapping[int, str]) -> None:
        self.texts.update(texts)
        self.data.update(data)

    def text(self, token_id: int) -> str:
        return self.texts.get(token_id, "")

    def name(self, token_id: int, details: AnswerDetails) -> str:
        """The name of the token in logprobs."""
        return f"token_id:{token_id}" if details.tokens_as_ids else self.text(token_id)

    def characters(self, token_id: int) -> tuple[int, bool]:
        """How many characters begin in the token, and whether it first goes on with one that has begun before."""
        exact = self.data.get(token_id)
        if exact is None:
            return len(self.text(token_id)), False
        goes_on = [byte & 0xC0 == 0x80 for byte in bytes.fromhex(exact)]  # as UTF-8 marks them
        return goes_on.count(False), goes_on[0]

    def bytes_of(self, token_id: int) -> list[int]:
        exact = self.data.get(token_id)
        return list(self.text(token_id).encode("utf-8", "replace") if exact is None else bytes.fromhex(exact))


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The prompt of a request. ``text`` is its decoded text, ``state`` [H] its pooled hidden state. ``offsets`` gives,
    for each token, its first character in the encoded text and the one after its last; empty: unknown. ``told``: what
    answers say of its tokens, made once for all choices."""

    text: str
    tokens: list[Token]
    state: Float32Array | None = None
    offsets: Sequence[list[int]] = ()
    told: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def read_tokens(
    ids: Int32Array, bits: Int32Array, counts: Int32Array, tops: tuple[Int32Array, Int32Array]
) -> list[Token]:
    """Tokens from columns as in :class:`pagebus.bus.messages.ReplyBatch`: the whole of it, or one choice's part."""
    pairs = np.empty((len(tops[0]), 2), "<i4")
    pairs[:, 0], pairs[:, 1] = tops
    packed = pairs.tobytes()
    logprobs, tokens, start = bits.view("<f4").tolist(), [], 0
    for token_id, logprob, count in zip(ids.tolist(), logprobs, counts.tolist(), strict=True):
        if count < 0:
            tokens.append(Token(token_id))
            continue
        end = start + TOP.size * count
        tokens.append(Token(token_id, logprob, packed[start:end]))
        start = end
    return tokens


def read_prompt(reply: PromptReply) -> PromptInfo:
    """The prompt's tokens, the first without a log probability."""
    if len(reply.pooled_bits):
        return PromptInfo(reply.text, [], reply.pooled_bits.view("<f4"))
    ids = reply.token_ids.tolist()
    if reply.num_top is None or len(ids) < 2:
        offsets = reply.token_offsets.reshape(-1, 2).tolist()
        return PromptInfo(reply.text, [Token(token_id) for token_id in ids], offsets=offsets)
    counts = reply.ranks * 0 + reply.num_top
    scored = read_tokens(reply.token_ids[1:], reply.token_bits, counts, (reply.top_ids, reply.top_bits))
    for token, rank in zip(scored, reply.ranks.tolist(), strict=True):
        token.rank = rank
    return PromptInfo(reply.text, [Token(ids[0]), *scored])


def completion_logprobs(
    tokens: Sequence[Token], names: TokenTexts, details: AnswerDetails, offset: int
) -> dict[str, Any]:
    """The ``logprobs`` object of a completion; ``offset`` is where its first token begins in the choice's text."""
    num_top, offsets = _num_told(details), []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        begun, goes_on = names.characters(token.id)
        offsets.append(max(0, offset - goes_on))
        offset += begun
        if token.logprob is None:
            tops.append(None)
            continue
        # The token itself comes first, then the others: with num_top 2 there may be three.
        pairs = [(token.id, token.logprob), *token.likeliest(num_top)]
        named: dict[str, float] = {}
        for token_id, logprob in pairs:
            named.setdefault(names.name(token_id, details), _finite(logprob))
        tops.append(named)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "tokens": [names.name(token.id, details) for token in tokens],
        "top_logprobs": tops,
    }


def echoed_logprobs(
    prompt: PromptInfo, tokens: Sequence[Token], names: TokenTexts, details: AnswerDetails
) -> dict[str, Any]:
    """The same of a prompt and the ``tokens`` behind it."""
    if "echo" not in prompt.told:
        prompt.told["echo"] = completion_logprobs(prompt.tokens, names, details, 0)
    of_prompt = prompt.told["echo"]
    own = completion_logprobs(tokens, names, details, text_length(prompt.tokens, names))
    return {name: [*of_prompt[name], *own[name]] for name in own}


def text_length(tokens: Sequence[Token], names: TokenTexts) -> int:
    """How far ``tokens`` move the text offset."""
    return sum(names.characters(token.id)[0] for token in tokens)


def chat_logprobs(tokens: Sequence[Token], names: TokenTexts, details: AnswerDetails) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        shown = LOWEST if logprob is None else _finite(logprob)
        return {"token": names.name(token_id, details), "logprob": shown, "bytes": names.bytes_of(token_id)}

    def others(token: Token) -> Iterator[tuple[int, float]]:
        """The alternatives shown with a token. Where the client has named them, the token itself comes first."""
        own = [] if token.logprob is None or not details.picked else [(token.id, token.logprob)]
        yield from dict([*own, *token.likeliest(_num_told(details))]).items()

    return {
        "content": [
            {
                **entry(token.id, token.logprob),
                "top_logprobs": [entry(token_id, value) for token_id, value in others(token)],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _num_told(details: AnswerDetails) -> int:
    """Number of alternatives per token in the answer."""
    return MAX_LOGPROB_TOKEN_IDS if details.picked else details.logprobs or 0


def prompt_logprobs(prompt: PromptInfo, names: TokenTexts, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token by id, itself first, then the most likely ones."""
    if "logprobs" not in prompt.told:
        prompt.told["logprobs"] = _prompt_logprobs(prompt, names, num_top)
    told: list[dict[str, Any] | None] = prompt.told["logprobs"]
    return told


def _prompt_logprobs(prompt: PromptInfo, names: TokenTexts, num_top: int) -> list[dict[str, Any] | None]:
    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}

    told: list[dict[str, Any] | None] = []
    for token in prompt.tokens:
        if token.logprob is None:
            told.append(None)
            continue
        entries = {str(token.id): entry(token.id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.likeliest(num_top), 1):
            entries.setdefault(str(token_id), entry(token_id, logprob, rank))
        told.append(entries)
    return told


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if not math.isnan(logprob) else LOWEST
