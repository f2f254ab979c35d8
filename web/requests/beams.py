"""Reads the fields of a beam search, and rejects what cannot be combined with it.

Beams are compared by the sum of the model's own logprobs, so fields that change logprobs or sample from them are
rejected; the model's own defaults for such fields are ignored. The winning beams are known only at the end, so stop
strings cannot be found in text before it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from pagebus.bus.messages import SamplingParams
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, same, type_name
from pagebus.web.requests.served_model import ServedModel

MAX_LENGTH_PENALTY = 10.0
"""Either way; vLLM and transformers know no bound, but powers of lengths beyond it leave nothing but ties."""
_CHANGES = "beams are compared by the model's own log probabilities"
_SAMPLES = "a beam search samples nothing"
_PROMPT = "log probabilities of the prompt are not told beside beams"
NOT_BESIDE: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "which beams win is known only at the end"),
    "temperature": ((0, 0.0, 1, 1.0), _CHANGES),
    "presence_penalty": ((0, 0.0), _CHANGES),
    "frequency_penalty": ((0, 0.0), _CHANGES),
    "repetition_penalty": ((1, 1.0), _CHANGES),
    "logit_bias": (({},), _CHANGES),
    "bad_words": (([],), _CHANGES),
    "allowed_token_ids": ((), _CHANGES),
    "top_p": ((1, 1.0), _SAMPLES),
    "top_k": ((0, -1), _SAMPLES),
    "min_p": ((0, 0.0), _SAMPLES),
    "stop": (([],), "beams have no text before the end: use stop_token_ids"),
    "prompt_logprobs": ((), _PROMPT),
    "repetition_detection": ((), "it ends an output that grows token by token"),
}
"""Fields that a beam search rejects, with the values that are harmless, and the reason."""


def wants_beams(fields: Fields) -> bool:
    """Take ``use_beam_search``, and check the fields beside it. To be called before these are taken."""
    wanted = fields.boolean("use_beam_search", False)
    if wanted:
        for name, (neutral, reason) in NOT_BESIDE.items():
            value = fields.peek(name)
            if value is not None and not any(same(value, each) for each in neutral):
                raise bad_field(name, f"is not available with use_beam_search: {reason}")
        if fields.peek("echo") is True and fields.peek("logprobs") is not None:
            raise bad_field("echo", f"is not available with use_beam_search and logprobs: {_PROMPT}")
    return wanted


def read_beams(fields: Fields, sampling: SamplingParams, *, wanted: bool) -> SamplingParams:
    """Take the fields of a beam search. Its width is ``n``, until ``best_of`` says more."""
    length_penalty = fields.number("length_penalty", 1.0, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    early_stopping = _read_early_stopping(fields)
    if wanted:
        return replace(
            sampling,
            beam_width=sampling.n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
        )
    for name, changed in (("length_penalty", length_penalty != 1), ("early_stopping", early_stopping is not False)):
        if changed:
            raise bad_field(name, "needs use_beam_search to be true")
    return sampling


def check_width(sampling: SamplingParams, model: ServedModel) -> None:
    """Check that the beam width is within the limit of this server."""
    if sampling.beam_width > model.max_beam_width:
        name = "best_of" if sampling.beam_width > sampling.n else "n"
        problem = f"must be at most {model.max_beam_width} with use_beam_search (--max-beam-width)"
        raise bad_field(name, f"{problem}, got {sampling.beam_width}")


def _read_early_stopping(fields: Fields) -> bool | Literal["never"]:
    value = fields.take("early_stopping", {"enum": [True, False, "never"]})
    if value is None:
        return False
    if value == "never":
        return "never"
    if not isinstance(value, bool):
        raise bad_field("early_stopping", f'must be a boolean or "never", got {type_name(value)}', code="invalid_type")
    return value
