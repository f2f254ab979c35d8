"""Token ids to text, one token at a time, exactly.

The rule for every tokenizer: the deltas of a sequence, joined, are ``decode(context + output)`` without what the
context alone had settled, whatever the steps were cut into. Text is *settled* when no later token can change it. What
is not yet settled, such as the first bytes of a character, is held back and flushed at the end (incomplete bytes as
U+FFFD).

Three decoders keep that rule, chosen by :func:`make_decoder` from the tokenizer's own decoder:

* :class:`ByteLevelDecoder` (Llama 3, Qwen): text is the UTF-8 of the tokens' bytes, so a table look-up does.
* :class:`SentencePieceDecoder` (Llama 2, Mistral, Gemma): pieces plus runs of byte tokens. A run is text only if all
  of it is valid UTF-8, so it is held until a token that is not a byte ends it.
* :class:`WindowDecoder` (anything else): the Rust tokenizer decodes a short window of tokens, all sequences in one
  call.

Ids the tokenizer has no token for, and special tokens when they are skipped, are no text at all.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from pagebus.actors.model.tokenizer import byte_alphabet

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WINDOW_TOKENS = 12
"""Length at which a window is cut down to its last settled part."""
HELD_TOKENS = 64
"""A window never holds more tokens back than this, so that endless garbage stays cheap."""


@dataclass(slots=True)
class TextState:
    """Where one sequence stands. Owned by the decoder that made it."""

    skip_special: bool
    spaces: bool = True
    pending: bytes = b""
    at_start: bool = False
    ids: list[int] = field(default_factory=list)
    settled: int = 0
    cut: int = 0
    last_added: bool = False


class Decoder(ABC):
    """Incremental detokenization of many sequences."""

    @abstractmethod
    def begin(self, context: Iterable[int], *, skip_special: bool = True, spaces: bool = True) -> TextState:
        """State of a sequence whose output follows the tokens ``context`` (the end of its prompt)."""

    @abstractmethod
    def push(self, states: Sequence[TextState], token_ids: Sequence[int]) -> list[str]:
        """Add one token to each state (no state twice); returns the text that each settles."""

    @abstractmethod
    def finish(self, state: TextState) -> str:
        """What was held back, as text. The state must not be used afterwards."""

    @abstractmethod
    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """One token as text, special tokens too (U+FFFD for bytes that are no text alone, then with the bytes)."""


class NoTextDecoder(Decoder):
    """For a model without tokenizer: no text."""

    def begin(self, context: Iterable[int], *, skip_special: bool = True, spaces: bool = True) -> TextState:
        return TextState(skip_special)

    def push(self, states: Sequence[TextState], token_ids: Sequence[int]) -> list[str]:
        return [""] * len(states)

    def finish(self, state: TextState) -> str:
        return ""

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        return "", None


class Vocabulary:
    """Token strings by id [vocab], None where there is no token; which of them are special, which were added."""

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        # As decode sees them: id_to_token applies the normalizer to added tokens, get_vocab does not.
        self.tokens: list[str | None] = [backend.id_to_token(i) for i in range(size)]
        special = {token.content for token in added.values() if token.special}
        self.special = frozenset(i for i, token in enumerate(self.tokens) if token in special)
        self.added: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}


class ByteLevelDecoder(Decoder):
    """Byte-level BPE: every token is a string of bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        alphabet = byte_alphabet()
        self._bytes = [_byte_level_bytes(token, alphabet) for token in vocabulary.tokens]
        self._size = len(self._bytes)
        whole = [_whole_text(data) for data in self._bytes]
        self._whole = (whole, _without(whole, vocabulary.special))
        self._special = vocabulary.special

    def begin(self, context: Iterable[int], *, skip_special: bool = True, spaces: bool = True) -> TextState:
        state = TextState(skip_special)
        for token_id in context:
            self._push(state, token_id)
        return state

    def push(self, states: Sequence[TextState], token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        whole, size = self._whole, self._size
        for state, token_id in zip(states, token_ids, strict=True):
            text = None
            if token_id < size and not state.pending:
                text = whole[state.skip_special][token_id]
            texts.append(self._push(state, token_id) if text is None else text)
        return texts

    def _push(self, state: TextState, token_id: int) -> str:
        if token_id >= self._size or (state.skip_special and token_id in self._special):
            return ""
        data = state.pending + self._bytes[token_id]
        text, used = utf_8_decode(data, "replace", False)
        state.pending = data[used:]
        return text

    def finish(self, state: TextState) -> str:
        return state.pending.decode("utf-8", "replace")

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        return _as_text(self._bytes[token_id] if token_id < self._size else b"")


class SentencePieceDecoder(Decoder):
    """Pieces with ``▁`` for a space and ``<0xNN>`` for bytes no piece covers.

    ``strip_first`` drops one space at the very beginning of a text, that is when nothing visible comes before it.
    """

    def __init__(self, vocabulary: Vocabulary, *, space: str = "▁", strip_first: bool) -> None:
        pieces = [(token or "").replace(space, " ") for token in vocabulary.tokens]
        self._pieces = (pieces, _without(pieces, vocabulary.special))
        self._special = vocabulary.special
        self._byte = _byte_tokens(vocabulary)
        self._strip_first = strip_first
        self._size = len(pieces)

    def begin(self, context: Iterable[int], *, skip_special: bool = True, spaces: bool = True) -> TextState:
        state = TextState(skip_special, at_start=self._strip_first)
        for token_id in context:
            self._push(state, token_id)
        state.at_start = state.at_start and not state.pending
        state.pending = _incomplete(state.pending)
        return state

    def push(self, states: Sequence[TextState], token_ids: Sequence[int]) -> list[str]:
        return [self._push(state, token_id) for state, token_id in zip(states, token_ids, strict=True)]

    def _push(self, state: TextState, token_id: int) -> str:
        if token_id >= self._size:
            return ""
        byte = self._byte.get(token_id)
        if byte is not None:
            state.pending += byte
            return ""
        text = self._pieces[state.skip_special][token_id] or ""
        if state.pending and not (state.skip_special and token_id in self._special):
            text = _run_text(state.pending) + text
            state.pending = b""
        return self._strip(state, text)

    def _strip(self, state: TextState, text: str) -> str:
        if state.at_start and text:
            state.at_start = False
            return text.removeprefix(" ")
        return text

    def finish(self, state: TextState) -> str:
        return self._strip(state, _run_text(state.pending))

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        if token_id >= self._size:
            return "", None
        byte = self._byte.get(token_id)
        return (self._pieces[False][token_id] or "", None) if byte is None else _as_text(byte)


class WindowDecoder(Decoder):
    """Any other decoder: decode a window of recent tokens, give out what goes beyond the text settled before."""

    def __init__(self, backend: Tokenizer, vocabulary: Vocabulary, *, byte_fallback: bool) -> None:
        self._backend = backend
        self._special = vocabulary.special
        self._added = vocabulary.added
        self._known = frozenset(i for i, token in enumerate(vocabulary.tokens) if token is not None)
        self._bytes = _byte_tokens(vocabulary) if byte_fallback else {}

    def begin(self, context: Iterable[int], *, skip_special: bool = True, spaces: bool = True) -> TextState:
        state = TextState(skip_special, spaces or skip_special)
        ids = [token_id for token_id in context if self._visible(state, token_id)]
        open_ids: list[int] = []
        while ids and ids[-1] in self._bytes:
            open_ids.insert(0, ids.pop())
        rest = len(_incomplete(b"".join(self._bytes[i] for i in open_ids)))
        state.ids = ids + open_ids[: len(open_ids) - rest]
        if state.ids:
            state.last_added = state.ids[-1] in self._added
            text = self._decode([state.ids])[0]
            state.settled = len(text) - (text.endswith(REPLACEMENT) and not open_ids)
            state.cut = len(state.ids) if state.settled == len(text) else 0
        state.ids += open_ids[len(open_ids) - rest :]
        return state

    def push(self, states: Sequence[TextState], token_ids: Sequence[int]) -> list[str]:
        texts = [""] * len(states)
        touched = [i for i, token_id in enumerate(token_ids) if self._visible(states[i], token_id)]
        for i in touched:
            states[i].ids.append(token_ids[i])
        cut: list[TextState] = []
        for i, text in zip(touched, self._decode([states[i].ids for i in touched]), strict=True):
            texts[i] = self._advance(states[i], text, cut)
        for state, text in zip(cut, self._decode([state.ids for state in cut]), strict=True):
            state.settled = len(text)
        return texts

    def _advance(self, state: TextState, text: str, cut: list[TextState]) -> str:
        """The newly settled part of ``text``, the window's. Puts the state on ``cut`` if its window was shortened."""
        settled = self._settled(state, text)
        delta = text[state.settled : settled]
        state.settled = max(settled, state.settled)
        if settled == len(text):
            if len(state.ids) >= WINDOW_TOKENS and state.cut:
                state.ids = state.ids[state.cut :]
                cut.append(state)
            state.cut = len(state.ids)
        if not state.spaces:
            added = self._added.get(state.ids[-1])
            if added is not None and state.last_added and delta:
                delta = added
            state.last_added = added is not None
        return delta

    def _settled(self, state: TextState, text: str) -> int:
        """How many characters of the window's text no later token can change."""
        held = len(state.ids) - state.cut
        if state.ids[-1] in self._bytes and held <= HELD_TOKENS:
            return state.settled
        if text.endswith(REPLACEMENT) and held <= HELD_TOKENS:
            return len(text) - 1
        return len(text)

    def _visible(self, state: TextState, token_id: int) -> bool:
        return token_id in self._known and not (state.skip_special and token_id in self._special)

    def _decode(self, windows: list[list[int]]) -> list[str]:
        if not windows:
            return []
        return self._backend.decode_batch(windows, skip_special_tokens=False)

    def finish(self, state: TextState) -> str:
        return self._decode([state.ids])[0][state.settled :] if state.ids else ""

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        if token_id in self._bytes:
            return _as_text(self._bytes[token_id])
        return (self._decode([[token_id]])[0] if token_id in self._known else ""), None


def make_decoder(backend: Tokenizer | None) -> Decoder:
    """The cheapest decoder that gives exactly the text of ``backend.decode``; None is a model without tokenizer."""
    if backend is None:
        return NoTextDecoder()
    vocabulary = Vocabulary(backend)
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder(vocabulary)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and len(steps) <= 4:
        space = steps[0]["pattern"].get("String")
        strip = steps[3:]
        ends = [(s["type"], s.get("content"), s.get("start"), s.get("stop")) for s in strip]
        if space and steps[0]["content"] == " " and ends in ([], [("Strip", " ", 1, 0)]):
            return SentencePieceDecoder(vocabulary, space=space, strip_first=bool(strip))
    return WindowDecoder(backend, vocabulary, byte_fallback="ByteFallback" in kinds)


def _decoder_steps(backend: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of JSON objects; empty if it has none."""
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    spec = json.loads(decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _byte_level_bytes(token: str | None, alphabet: Mapping[str, int]) -> bytes:
    """A token's bytes. One that does not use the alphabet (some added tokens) stands for itself."""
    if token is None:
        return b""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _whole_text(data: bytes) -> str | None:
    """The text of bytes that begin and end at character borders, None for others."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _as_text(data: bytes) -> tuple[str, bytes | None]:
    """Text, with the bytes where the text does not say them."""
    text = _whole_text(data)
    return (data.decode("utf-8", "replace"), data) if text is None else (text, None)


def _byte_tokens(vocabulary: Vocabulary) -> dict[int, bytes]:
    """The byte that each byte token (``<0xNN>``) stands for."""
    matches = ((i, BYTE_TOKEN.fullmatch(token)) for i, token in enumerate(vocabulary.tokens) if token)
    return {i: bytes([int(match[1], 16)]) for i, match in matches if match}


def _run_text(data: bytes) -> str:
    """Text of a run of byte tokens: if any of it is not valid UTF-8, all of it is replaced."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(data)


def _incomplete(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that could be the beginning of a character."""
    return data[utf_8_decode(data, "replace", False)[1] :]


def _without(texts: Sequence[str | None], ids: Iterable[int]) -> list[str | None]:
    """A copy with empty text at ``ids``."""
    result = list(texts)
    for i in ids:
        result[i] = ""
    return result
