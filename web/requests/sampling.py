"""Reads the sampling parameters of a request, with vLLM's names, defaults and ranges
(:class:`pagebus.bus.messages.SamplingParams`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pagebus.actors.model.token_bits import LONG_LIST, from_bits, to_bits
from pagebus.bus.messages import Int32Array, RepetitionDetection, SamplingParams
from pagebus.bus.messages.field_types import int_array
from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.http.fields import Fields, Schema, shown, type_name
from pagebus.web.http.limits import (
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_PATTERN_SIZE,
    MAX_REPETITION_PENALTY,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
)
from pagebus.web.requests.served_model import ServedModel

LOWEST_TEMPERATURE = 0.01
"""Temperatures between 0 and this one are lifted to it, as in vLLM: below it logits overflow."""
MAX_BIAS = 100.0
_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}
STOP: Schema = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}]}
_BAD_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_BYTES}
_LOGIT_BIAS: Schema = {
    "maxProperties": MAX_LOGIT_BIAS,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number"},
}


def read_sampling(fields: Fields, model: ServedModel, *, max_tokens: int | None) -> SamplingParams:
    """Take the sampling fields. ``max_tokens`` is what the client asked for, or the endpoint's default."""
    min_tokens = fields.integer("min_tokens", 0, 0, INT32_MAX)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"must not be more than max_tokens ({max_tokens}), got {min_tokens}")
    defaults = model.default_sampling
    allowed = _read_allowed_token_ids(fields, model.vocab_size)
    are_many = len(allowed) >= LONG_LIST
    sampling = SamplingParams(
        n=fields.integer("n", 1, 1, MAX_N),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_lift(fields.number("temperature", float(defaults.get("temperature", 1.0)), 0, 2)),
        top_p=fields.number("top_p", float(defaults.get("top_p", 1.0)), 0, 1, above_low=True),
        top_k=max(0, fields.integer("top_k", int(defaults.get("top_k", 0)), -1, INT32_MAX)),
        min_p=fields.number("min_p", float(defaults.get("min_p", 0.0)), 0, 1),
        repetition_penalty=fields.number(
            "repetition_penalty",
            float(defaults.get("repetition_penalty", 1.0)),
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        seed=_read_seed(fields),
        stop=_read_stop(fields),
        stop_token_ids=_read_stop_token_ids(fields, model.vocab_size),
        ignore_eos=fields.boolean("ignore_eos", False),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        spaces_between_special_tokens=fields.boolean("spaces_between_special_tokens", True),
        logit_bias=_read_logit_bias(fields, model.vocab_size),
        bad_words=_read_bad_words(fields),
        allowed_token_ids=() if are_many else allowed,
        allowed_tokens=to_bits(allowed) if are_many else "",
        repetition_detection=_read_repetition_detection(fields),
        detokenize=fields.boolean("detokenize", True),
        num_speculative_tokens=fields.integer("num_speculative_tokens", None, 0, MAX_SPECULATIVE_TOKENS),
    )
    if sampling.stop and not sampling.detokenize:
        raise bad_field("stop", "needs detokenize to be true: it is matched in the text")
    return sampling


def read_max_tokens(
    fields: Fields, name: str, default: int | None, model: ServedModel, *, least: int = 1
) -> int | None:
    """A token count of at least ``least``, and no more than the context holds."""
    value = fields.integer(name, default, least, INT32_MAX)
    given = value is not None and value != default
    if given and value is not None and model.max_model_len is not None and value > model.max_model_len:
        raise bad_field(name, f"must be at most {model.max_model_len}, the maximum context length, got {value}")
    return value


@cache
def token_id(vocab_size: int | None) -> Schema:
    """The JSON Schema of a token id that :func:`check_token_ids` accepts."""
    return {"type": "integer", "minimum": 0, "maximum": _last_token_id(vocab_size)}


def check_token_ids(ids: list[Any], name: str, vocab_size: int | None) -> None:
    """Integers inside the vocabulary (inside int32 where its size is not known)."""
    if ids and set(map(type, ids)) != {int}:
        index, wrong = next((i, v) for i, v in enumerate(ids) if type(v) is not int)
        raise bad_field(f"{name}[{index}]", f"must be a token id (an integer), got {type_name(wrong)}",
                        code="invalid_type")  # fmt: skip
    limit = _last_token_id(vocab_size)
    if ids and (min(ids) < 0 or max(ids) > limit):
        index, wrong = next((i, v) for i, v in enumerate(ids) if not 0 <= v <= limit)
        raise _outside(f"{name}[{index}]", wrong, limit)


def _last_token_id(vocab_size: int | None) -> int:
    return INT32_MAX if vocab_size is None else vocab_size - 1


def _outside(path: str, token_id: int, limit: int) -> ApiError:
    return bad_field(path, f"token id {shown(token_id)} is outside the vocabulary (0 to {limit})")


def token_array(ids: list[Any], name: str, vocab_size: int | None) -> Int32Array:
    """Token ids that :func:`check_token_ids` accepts, in a tenth of the time that this takes with a conversion."""
    found = _as_array(ids, _last_token_id(vocab_size))
    if found is None:
        check_token_ids(ids, name, vocab_size)
    return np.array(ids, np.int32) if found is None else found


def _as_array(ids: list[Any], limit: int) -> Int32Array | None:
    """None: they are no token ids."""
    try:
        found = int_array(ids)
    except (TypeError, OverflowError):
        return None
    if len(found) and found.view(np.uint32).max() > limit:
        return None
    perhaps_booleans = (found <= 1).nonzero()[0].tolist()
    return found if all(type(ids[place]) is int for place in perhaps_booleans) else None


def allowed_ids(bits: str) -> list[int]:
    """The ids of ``allowed_tokens``."""
    ids: list[int] = from_bits(bits).nonzero()[0].tolist()
    return ids


def _lift(temperature: float) -> float:
    return LOWEST_TEMPERATURE if 0 < temperature < LOWEST_TEMPERATURE else temperature


def _read_seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", None, INT64_MIN, INT64_MAX)
    return None if seed == -1 else seed  # vLLM's other way to say "any"


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop", STOP)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise bad_field("stop", f"must be a string or an array of strings, got {type_name(value)}", code="invalid_type")
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"must have at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        name = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(stop, str):
            raise bad_field(name, f"must be a string, got {type_name(stop)}", code="invalid_type")
        if not stop:
            raise bad_field(name, "must not be empty")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise bad_field(name, f"must have at most {MAX_STOP_BYTES} bytes, got {len(stop.encode())}")
    return tuple(stops)


def _read_stop_token_ids(fields: Fields, vocab_size: int | None) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids", max_items=MAX_STOP_TOKEN_IDS, items=token_id(vocab_size)) or []
    check_token_ids(ids, "stop_token_ids", vocab_size)
    return tuple(ids)


def _read_repetition_detection(fields: Fields) -> RepetitionDetection | None:
    """vLLM's words for when an output that repeats itself is ended; a largest size of 0 asks for nothing."""
    given = fields.object("repetition_detection")
    if given is None:
        return None
    inner = Fields(given, fields.path("repetition_detection"))
    most = inner.integer("max_pattern_size", 0, 0, MAX_PATTERN_SIZE)
    least = inner.integer("min_pattern_size", 0, 0, MAX_PATTERN_SIZE)
    count = inner.integer("min_count", 0, 0, INT32_MAX)
    inner.finish({})
    if least > most:
        raise bad_field(inner.path("min_pattern_size"), f"must be at most max_pattern_size ({most}), got {least}")
    if most and count < 2:
        raise bad_field(inner.path("min_count"), f"must be at least 2, got {count}")
    return RepetitionDetection(max_pattern_size=most, min_pattern_size=max(1, least), min_count=count) if most else None


def _read_bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.array("bad_words", max_items=MAX_BAD_WORDS, items=_BAD_WORD) or []
    for index, word in enumerate(words):
        name = f"bad_words[{index}]"
        if not isinstance(word, str):
            raise bad_field(name, f"must be a string, got {type_name(word)}", code="invalid_type")
        if not word.strip():
            raise bad_field(name, "must not be empty")
        if len(word.encode("utf-8", "surrogatepass")) > MAX_BAD_WORD_BYTES:
            raise bad_field(name, f"must have at most {MAX_BAD_WORD_BYTES} bytes")
    return tuple(words)


def _read_allowed_token_ids(fields: Fields, vocab_size: int | None) -> tuple[int, ...]:
    most = min(vocab_size or MAX_ALLOWED_TOKEN_IDS, MAX_ALLOWED_TOKEN_IDS)
    ids = fields.array("allowed_token_ids", max_items=most, min_items=1, items=token_id(vocab_size))
    if ids is None:
        return ()
    if not ids:
        raise bad_field("allowed_token_ids", "must not be empty")
    check_token_ids(ids, "allowed_token_ids", vocab_size)
    return tuple(ids)


def _read_logit_bias(fields: Fields, vocab_size: int | None) -> dict[int, float]:
    given = fields.object("logit_bias", _LOGIT_BIAS) or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise bad_field("logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, got {len(given)}")
    biases: dict[int, float] = {}
    limit = _last_token_id(vocab_size)
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise bad_field("logit_bias", f"keys must be token ids, got {key[:20]!r}")
        if type(value) not in (int, float):
            raise bad_field(f"logit_bias.{key}", f"must be a number, got {type_name(value)}", code="invalid_type")
        if int(key) > limit:
            raise _outside(f"logit_bias.{key}", int(key), limit)
        biases[int(key)] = min(max(float(value), -MAX_BIAS), MAX_BIAS)
    return biases
