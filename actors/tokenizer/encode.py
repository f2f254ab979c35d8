"""Requests to token ids the scheduler can admit. Pure work for a thread: no bus, no loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from pagebus.actors.model.token_bits import fits
from pagebus.actors.tokenizer.chat import ChatTemplate, Rendered
from pagebus.actors.tokenizer.hashed_prompts import HashedPrompts
from pagebus.actors.tokenizer.pieces import Piece, Placed, continued, placed
from pagebus.actors.tokenizer.pooled import PooledTexts
from pagebus.actors.tokenizer.refusal import Refusal
from pagebus.actors.tokenizer.thoughts import thought_in
from pagebus.bus.messages import (
    GenerateRequest,
    Int32Array,
    PromptReply,
    RequestFailed,
    SamplingParams,
    TokenizedRequest,
)
from pagebus.bus.messages.field_types import int_array, no_ints
from pagebus.bus.messages.requests import MOST_PREDICTION_TOKENS
from pagebus.bus.messages.segments import without_segments

NO_TOKENIZER = "This model has no tokenizer: give the prompt as token ids."
MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words of a request together, as written without a space in front."""
SPARE_CANDIDATES = 32
"""Tokens that a vocabulary must have beyond the beams and end tokens of a search: the model's own end tokens, what is
reported."""
QUICK_LENGTH = 2048
"""Characters of text that are encoded in less time (about 0.3 ms) than a thread takes to be woken for them on a quiet
machine, and to wake the loop again."""
IDS_PER_CHARACTER = 16
"""Token ids are hashed only. A thread would not spare the loop that time: it holds the interpreter's lock meanwhile."""
HEAVY_LENGTH = 2**16
"""Token ids, or characters of text, that take some 10 ms to encode."""
INTERNAL = "The prompt could not be tokenized; the server's log has the request id."


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits: ``max_model_len`` tokens of prompt plus output, token ids in [0, ``vocab_size``). ``hashed``: the
    scheduler looks up cached blocks of ``block_size`` tokens."""

    max_model_len: int
    vocab_size: int
    block_size: int
    hashed: bool = True
    spare: int = 1
    """Tokens of the length that a prompt leaves to its output: none, where the model only pools."""
    segments: bool = False
    """Whether the model tells the texts of a pair apart by segments."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; ``error`` is set if something unforeseen went wrong (the reply is a 500 then)."""

    request: GenerateRequest
    reply: TokenizedRequest | RequestFailed | PromptReply
    error: Exception | None = None


class Encoder:
    """Encodes batches of requests. Thread-safe; the Rust tokenizer releases the GIL while it works."""

    def __init__(self, tokenizer: Any | None, limits: Limits, *, chat_template: str | None = None) -> None:
        """``tokenizer`` is a ``transformers`` one, None where only token ids are served. Raises TokenizerError."""
        self._limits, self._hashed = limits, HashedPrompts(limits.block_size)
        self._backend: Tokenizer | None = None if tokenizer is None else tokenizer.backend_tokenizer
        self._chat = None if tokenizer is None else ChatTemplate(tokenizer, chat_template)
        self.reads_text = tokenizer is not None
        pools = self.reads_text and not limits.spare
        self._pooled = PooledTexts(tokenizer, segments=limits.segments) if pools else None
        self._max_chars = _max_chars(self._backend, limits.max_model_len) if self._backend is not None else None
        self._plain: Tokenizer | None = None
        self._plain_lock = threading.Lock()

    @property
    def max_chars(self) -> int | None:
        """Characters from which a text does not fit into the context for certain; None: there is no such number."""
        return self._max_chars

    def is_heavy(self, request: GenerateRequest) -> bool:
        """Whether it takes so long to encode that others are not to wait for it."""
        contents = (message.get("content") for message in request.messages or () if isinstance(message, dict))
        chat = (*contents, request.tools, request.documents, request.chat_template_kwargs)
        return _length(request) + sum(len(str(each)) for each in chat if each) > HEAVY_LENGTH

    def thought_in(self, ids: Int32Array, reasoning: str) -> int:
        """With how many tokens of reasoning a prompt ends; -1: with none."""
        return -1 if self._backend is None else thought_in(ids, self._backend, reasoning)

    def close(self) -> None:
        """End what renders chats."""
        if self._chat is not None:
            self._chat.close()

    def is_quick(self, requests: Sequence[GenerateRequest]) -> bool:
        """Whether encoding is quick enough for the event loop. A chat must be rendered, in another process."""
        length = sum(_length(each, IDS_PER_CHARACTER) for each in requests)
        return length <= QUICK_LENGTH and all(request.messages is None for request in requests)

    def encode(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        """One outcome per request, in order. Never raises for what a request holds."""
        taken_s = time.time()
        prompts: list[str | Int32Array | Placed | Exception] = [self._prompt(request) for request in requests]
        for special in (False, True):
            rows = [
                i
                for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
                if isinstance(prompt, str) and request.add_special_tokens == special
            ]
            encoded = self._encode_texts([str(prompts[i]) for i in rows], special)
            for i, ids in zip(rows, encoded, strict=True):
                if special and self._pooled is not None and not isinstance(ids, Exception):
                    ids = self._pooled.ended_once(ids)
                prompts[i] = ids
        return [self._finish(request, prompt, taken_s) for request, prompt in zip(requests, prompts, strict=True)]

    def _prompt(self, request: GenerateRequest) -> str | Int32Array | Placed | Exception:
        """Token ids, the text still to be encoded, or why there is neither."""
        try:
            if request.messages is None and request.prompt is None:
                return request.prompt_token_ids
            if self._chat is None:
                raise Refusal(NO_TOKENIZER, param=_field(request))
            rendered = Rendered((request.prompt or "",)) if request.messages is None else self._chat.render(request)
            length = sum(map(len, rendered.pieces))
            if self._max_chars and length > self._max_chars and request.truncate_prompt_tokens is None:
                raise self._too_long(request, f"more than {self._limits.max_model_len}")
            if len(rendered.pieces) == 1 and not request.return_token_offsets:
                return self._pooled_prompt(request, rendered.pieces[0])
            pieces = list(self._encode_pieces(rendered, request.add_special_tokens))
            if request.return_token_offsets:
                return placed(pieces)
            return int_array([token for piece in pieces for token in piece.ids])
        except Exception as error:
            return error

    def _pooled_prompt(self, request: GenerateRequest, text: str) -> str | Int32Array:
        """The text, if it can be encoded with others; the ids of a pair, or of what is cut."""
        keep = request.truncate_prompt_tokens
        if self._pooled is None or request.messages is not None or request.tokens_only:
            return text
        if keep is None and not request.second_text:
            return text
        return self._pooled.encode(request, self._kept_tokens(request))

    def _encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[Int32Array | Exception]:
        """All texts in one call; one by one if any of them cannot be encoded, so that only that one fails."""
        if not texts:
            return []
        assert self._backend is not None
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [int_array(encoding.ids) for encoding in encodings]
        except Exception as error:
            if len(texts) == 1:
                return [_text_error(texts[0], error)]
        return [ids for text in texts for ids in self._encode_texts([text], add_special_tokens)]

    def _encode_pieces(self, rendered: Rendered, add_special_tokens: bool) -> Iterator[Piece]:
        """A chat in which clients wrote special tokens: those are encoded as the characters they are."""
        assert self._backend is not None
        for i, text in enumerate(rendered.pieces):
            if i == 0:
                yield self._encode_first(text, add_special_tokens)
            elif text:
                piece = continued(self._plain_tokenizer() if i % 2 else self._backend, text)
                if i % 2 and self._backend.token_to_id(text) in piece.ids:
                    raise Refusal(f"messages: {text!r} cannot be written as plain text here", param="messages")
                yield piece

    def _encode_first(self, text: str, add_special_tokens: bool) -> Piece:
        assert self._backend is not None
        try:
            return Piece(text, self._backend.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:
            raise _text_error(text, error) from None

    def _plain_tokenizer(self) -> Tokenizer:
        """A copy of the tokenizer that takes special tokens for plain text; made when first needed."""
        assert self._backend is not None
        with self._plain_lock:
            if self._plain is None:
                plain = Tokenizer.from_str(self._backend.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _finish(
        self, request: GenerateRequest, prompt: str | Int32Array | Placed | Exception, taken_s: float
    ) -> Outcome:
        """Check the prompt against the limits and complete the request."""
        try:
            if isinstance(prompt, Exception):
                raise prompt
            if request.tokens_only:
                return Outcome(request, self._told(request, prompt))
            ids = self._checked(request, np.asarray(prompt, np.int32))
            sampling = self._resolved(request, len(ids))
            hashes = self._hashes(request, ids) if self._limits.hashed else no_ints()
            reply = TokenizedRequest(
                request_id=request.request_id,
                ingress=request.ingress,
                sampling=sampling,
                priority=request.priority,
                cache_salt=request.cache_salt,
                arrived_s=request.arrived_s,
                tokenized_s=time.time(),
                prompt_token_ids=ids,
                block_hashes=hashes,
                is_job=request.is_job,
                attempt=request.attempt,
                taken_s=taken_s,
                client=request.client,
                weight=request.weight,
                traced=request.traced,
                shared=request.shared,
                prediction_token_ids=self._prediction(request.prediction),
                adapter=request.adapter,
            )
            return Outcome(request, reply)
        except Refusal as refusal:
            return Outcome(request, refusal.reply(request))
        except Exception as error:
            return Outcome(request, Refusal(INTERNAL, status=500).reply(request), error)

    def _hashes(self, request: GenerateRequest, ids: Int32Array) -> Int32Array:
        digest = "" if request.adapter is None else request.adapter.digest
        return self._hashed.hashes(ids, request.cache_salt, digest)

    def _prediction(self, text: str | None) -> Int32Array:
        """The first tokens of a text that the output is expected to resemble."""
        if not text:
            return no_ints()
        if self._backend is None:
            raise Refusal(NO_TOKENIZER, param="prediction")
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise _text_error(text, error) from None
        return np.array(ids[:MOST_PREDICTION_TOKENS], np.int32)

    def _told(self, request: GenerateRequest, prompt: str | Int32Array | Placed) -> PromptReply:
        """The tokens of a prompt, what they are called, and for a prompt of ids their text."""
        if self._backend is None:
            raise Refusal(NO_TOKENIZER)
        found = prompt if isinstance(prompt, Placed) else Placed(np.asarray(prompt, np.int32), no_ints())
        kept = self._kept(request, len(found.ids))
        ids, offsets = found.ids[kept], found.offsets.reshape(-1, 2)[kept].reshape(-1)
        names = {token_id: self._backend.id_to_token(token_id) or "" for token_id in set(ids.tolist())}
        as_ids = request.prompt is None and request.messages is None
        skips = request.sampling.skip_special_tokens
        text = self._backend.decode(ids.tolist(), skip_special_tokens=skips) if as_ids else ""
        return PromptReply(request_id=request.request_id, text=text, token_texts=names, token_ids=ids,
                           token_offsets=offsets)  # fmt: skip

    def _checked(self, request: GenerateRequest, ids: Int32Array) -> Int32Array:
        """The prompt's ids, truncated as asked for; never empty, never outside the vocabulary, never too long."""
        length, what = self._limits.max_model_len, _field(request)
        ids = ids[self._kept(request, len(ids))]
        if len(ids) == 0:
            raise Refusal("The prompt is empty; it must have at least one token.", param=what)
        known = without_segments(ids) if self._limits.segments else ids
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= self._limits.vocab_size:
            bad = low if low < 0 else high
            raise Refusal(f"Token id {bad} is not in the vocabulary (0 to {self._limits.vocab_size - 1}).", param=what)
        if len(ids) > length - self._limits.spare:
            raise self._too_long(request, str(len(ids)))
        return ids

    def _kept(self, request: GenerateRequest, num_tokens: int) -> slice:
        """Which of the prompt's ``num_tokens`` tokens are left once it is truncated as requested."""
        keep = self._kept_tokens(request)
        if keep is None:
            return slice(num_tokens)
        return slice(keep) if request.truncation_side == "right" else slice(max(0, num_tokens - keep), num_tokens)

    def _kept_tokens(self, request: GenerateRequest) -> int | None:
        """The most tokens that truncation leaves; None: it is not asked for."""
        length, keep = self._limits.max_model_len, request.truncate_prompt_tokens
        if keep is None:
            return None
        if keep < -1 or keep == 0 or keep > length:
            raise Refusal(f"truncate_prompt_tokens: must be -1 or 1 to {length}", param="truncate_prompt_tokens")
        if keep != -1:
            return keep
        return max(1, length - (request.sampling.max_tokens or 1)) if self._limits.spare else length

    def _too_long(self, request: GenerateRequest, num_tokens: str) -> Refusal:
        needs = ", and at least one is needed for the output" if self._limits.spare else ""
        return Refusal(
            f"This model's maximum context length is {self._limits.max_model_len} tokens. However, your prompt has "
            f"{num_tokens} tokens{needs}. Please reduce the length of the prompt.",
            param=_field(request),
        )

    def _resolved(self, request: GenerateRequest, num_prompt_tokens: int) -> SamplingParams:
        """Sampling parameters with ``max_tokens`` set, and everything in them inside context and vocabulary."""
        sampling = request.sampling
        rest = self._limits.max_model_len + 1 - self._limits.spare - num_prompt_tokens
        if sampling.max_tokens is not None and sampling.max_tokens > rest:
            raise Refusal(
                f"This model's maximum context length is {self._limits.max_model_len} tokens. However, your prompt has "
                f"{num_prompt_tokens} tokens and max_tokens is {sampling.max_tokens}: at most {rest} fit. "
                "Please reduce the length of the prompt or max_tokens.",
                param="max_tokens",
            )
        resolved = replace(sampling, max_tokens=rest) if sampling.max_tokens is None else sampling
        if resolved.min_tokens > (resolved.max_tokens or 0):
            raise Refusal(
                f"min_tokens is {resolved.min_tokens}, but only {resolved.max_tokens} tokens fit", param="min_tokens"
            )
        needed = sampling.beam_width + len(sampling.stop_token_ids) + SPARE_CANDIDATES
        if sampling.beam_width and needed > self._limits.vocab_size:
            raise Refusal(f"n: a vocabulary of {self._limits.vocab_size} is too small for so many beams", param="n")
        if sampling.bad_words:
            resolved = replace(resolved, bad_words_token_ids=self._bad_words(sampling.bad_words))
        for name, ids in resolved.token_ids.items():
            if any(not 0 <= i < self._limits.vocab_size for i in ids):
                raise Refusal(
                    f"{name}: token ids must be 0 to {self._limits.vocab_size - 1}, the vocabulary", param=name
                )
        if sampling.allowed_tokens and not fits(sampling.allowed_tokens, self._limits.vocab_size):
            text = f"allowed_token_ids: token ids must be 0 to {self._limits.vocab_size - 1}, the vocabulary"
            raise Refusal(text, param="allowed_token_ids")
        return resolved

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokens that write it at the beginning of a text; and, as in vLLM, behind a space where
        that is as many tokens but begins with another."""
        if self._backend is None:
            raise Refusal("bad_words: this model has no tokenizer", param="bad_words")
        plain = [word.lstrip() for word in words]
        alone = [tuple(each.ids) for each in self._backend.encode_batch_fast(plain, add_special_tokens=False)]
        _check_length(alone)
        spaced = self._backend.encode_batch_fast([" " + word for word in plain], add_special_tokens=False)
        found = [ids for ids in alone if ids]
        for first, second in zip(alone, (tuple(each.ids) for each in spaced), strict=True):
            if first and len(first) == len(second) and first[0] != second[0]:
                found.append(second)
        return tuple(dict.fromkeys(found))


def _check_length(words: list[tuple[int, ...]]) -> None:
    if sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
        raise Refusal(f"bad_words: must have at most {MAX_BAD_WORD_TOKENS} tokens together", param="bad_words")


def _max_chars(backend: Tokenizer, max_model_len: int) -> int | None:
    """Length from which a text has more than ``max_model_len`` tokens for certain, so that none is encoded in vain.

    None where a token may stand for text of any length: one for what is unknown, or one that swallows spaces around it.
    """
    added = backend.get_added_tokens_decoder().values()
    model: Any = backend.model
    covers_all = getattr(model, "byte_fallback", False) or "ByteLevel" in repr(backend.decoder)
    if not covers_all or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    normalizer_shrinks = 4  # at most: composed characters
    return normalizer_shrinks * longest * max_model_len


def _length(request: GenerateRequest, ids_per_character: int = 1) -> int:
    """Token ids, and characters of text, that have to be looked at."""
    sampling, texts = request.sampling, (request.prompt, request.second_text, request.prediction)
    length = sum(len(text or "") for text in (*texts, sampling.allowed_tokens, *sampling.bad_words))
    return length + len(request.prompt_token_ids) // ids_per_character + len(sampling.allowed_token_ids)


def _field(request: GenerateRequest) -> str:
    if request.sampling.pooling:
        return "input"
    return "prompt" if request.messages is None else "messages"


def _text_error(text: str, error: Exception) -> Exception:
    """A text that is no Unicode is the client's fault; anything else is ours."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Refusal("The prompt is not valid Unicode (it has lone surrogates).", param="prompt")
    return error
