"""Texts for models that pool: a pair in one prompt, truncation that leaves special tokens, one end token."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from pagebus.bus.messages import GenerateRequest, Int32Array
from pagebus.bus.messages.segments import with_segments


class PooledTexts:
    """Encodes such texts. Thread-safe. ``segments``: the model also distinguishes the two texts of a pair by their
    tokens' segments."""

    def __init__(self, tokenizer: Any, *, segments: bool) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._segments = segments
        self._end = _end_token(tokenizer, self._backend)

    def encode(self, request: GenerateRequest, keep: int | None) -> Int32Array:
        """The ids of a pair, or of one text of which at most ``keep`` tokens are left, the special ones included. With
        segments in them."""
        adds, side = request.add_special_tokens, request.truncation_side
        first = self._backend.encode(request.prompt or "", add_special_tokens=False)
        second = None
        if request.second_text:  # an empty one is none, as to transformers' tokenizers
            second = self._backend.encode(request.second_text, add_special_tokens=False)
        if keep is not None:
            spare = self._backend.num_special_tokens_to_add(second is not None) if adds else 0
            _truncate(first, second, max(0, keep - spare), side)
        whole = self._backend.post_process(first, second, adds)
        ids = np.array(whole.ids, np.int32)
        if self._segments and second is not None:
            return with_segments(ids, np.array(whole.type_ids, np.int32))
        return self.ended_once(ids) if adds and second is None else ids

    def ended_once(self, ids: Int32Array) -> Int32Array:
        """A prompt whose text ends with the token that the tokenizer adds has it once. Where the tokenizer ought to add
        one and does not, it is added here."""
        if self._end is None or not len(ids):
            return ids
        if ids[-1] != self._end:
            return np.append(ids, np.int32(self._end))
        return ids[:-1] if len(ids) > 1 and ids[-2] == self._end else ids


def _truncate(first: Encoding, second: Encoding | None, room: int, side: Literal["left", "right"]) -> None:
    """Leave ``room`` tokens. Of a pair the longer text is cut first, and both to halves where that is not enough."""
    if second is None:
        first.truncate(room, direction=side)
        return
    short, long = (second, first) if len(first) > len(second) else (first, second)
    if len(short) + len(long) <= room:
        return
    kept = min(len(short), room // 2)
    short.truncate(kept, direction=side)
    long.truncate(room - kept, direction=side)


def _end_token(tokenizer: Any, backend: Tokenizer) -> int | None:
    """The token that ends every prompt: what the tokenizer adds behind a text, or what its configuration promises."""
    with_specials, without = backend.encode("a"), backend.encode("a", add_special_tokens=False)
    if with_specials.ids[-1:] != without.ids[-1:]:
        return with_specials.ids[-1]
    promised = getattr(tokenizer, "add_eos_token", False) and tokenizer.eos_token_id is not None
    return int(tokenizer.eos_token_id) if promised else None
