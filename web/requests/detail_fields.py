"""Reads the fields that ask for details of an answer (:class:`pagebus.web.calls.answer_details.AnswerDetails`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from pagebus.bus.messages import SamplingParams
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.parsing.output import Parsing
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, shown
from pagebus.web.http.limits import INT32_MAX, MAX_BEAM_LOGPROBS, MAX_LOGPROB_TOKEN_IDS, MAX_N, MAX_PROMPT_LOGPROBS
from pagebus.web.requests.sampling import check_token_ids, token_id
from pagebus.web.requests.served_model import ServedModel


def read_completion_details(
    fields: Fields, sampling: SamplingParams, model: ServedModel, *, echo: bool, prompt_only: bool, stream: bool
) -> tuple[SamplingParams, AnswerDetails | None]:
    """The sampling parameters with what the details need, and the details; None if there are none."""
    best_of = fields.integer("best_of", sampling.n, 1, MAX_N)
    if best_of < sampling.n:
        raise bad_field("best_of", f"must be at least n ({sampling.n}), got {best_of}")
    if best_of > sampling.n and stream:
        raise bad_field("best_of", "must not be more than n when stream is true: the best are known only at the end")
    logprobs = _read_count(fields, "logprobs", None, model)
    picked = _read_picked(fields, sampling, model, wanted=logprobs is not None)
    adjusted, details = _read(fields, sampling, logprobs, model, picked=picked, stream=stream, echo=echo)
    if sampling.beam_width:  # the search itself gives the best
        adjusted, best_of = structs.replace(adjusted, beam_width=best_of), sampling.n
    if best_of > sampling.n:
        # The logprobs decide which are the best.
        adjusted = structs.replace(adjusted, n=best_of, logprobs=0 if logprobs is None else adjusted.logprobs)
    if prompt_only:
        details = replace(details, prompt_only=True)
        adjusted = structs.replace(adjusted, max_tokens=1, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    plain = best_of == sampling.n and details == AnswerDetails(num_choices=sampling.n)
    return adjusted, None if plain else details


def read_chat_details(
    fields: Fields,
    sampling: SamplingParams,
    messages: Sequence[Mapping[str, Any]],
    parsing: Parsing | None,
    model: ServedModel,
    *,
    stream: bool,
) -> tuple[SamplingParams, AnswerDetails | None]:
    """As for completions, in the chat's own fields. ``echo`` is about what the assistant has said already, if the last
    message is its own."""
    wanted = fields.boolean("logprobs", False)
    num_top = _read_count(fields, "top_logprobs", 0, model)
    if num_top and not wanted:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    picked = _read_picked(fields, sampling, model, wanted=wanted)
    prompt_text = fields.boolean("return_prompt_text", False)
    adjusted, details = _read(
        fields, sampling, num_top if wanted else None, model, picked=picked, stream=stream, echo=False
    )
    if prompt_text:
        adjusted, details = structs.replace(adjusted, return_prompt_text=True), replace(details, prompt_text=True)
    if parsing is not None:
        details = replace(details, parsing=parsing)
        adjusted = structs.replace(adjusted, return_text_lengths=bool(parsing.reasoning))
    if fields.boolean("echo", False) and messages[-1]["role"] == "assistant":
        details = replace(details, said=messages[-1]["content"])
    return adjusted, None if details == AnswerDetails(num_choices=sampling.n) else details


def _read(
    fields: Fields,
    sampling: SamplingParams,
    logprobs: int | None,
    model: ServedModel,
    *,
    picked: tuple[int, ...],
    stream: bool,
    echo: bool,
) -> tuple[SamplingParams, AnswerDetails]:
    prompt_logprobs = _read_count(fields, "prompt_logprobs", None, model, most=MAX_PROMPT_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise bad_field("prompt_logprobs", "is not available when stream is true")
    if sampling.beam_width and (logprobs or 0) > MAX_BEAM_LOGPROBS:
        raise bad_field("logprobs", f"must be at most {MAX_BEAM_LOGPROBS} with use_beam_search, got {logprobs}")
    details = AnswerDetails(
        num_choices=sampling.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
        picked=bool(picked),
    )
    if details == AnswerDetails(num_choices=sampling.n):
        return sampling, details
    if echo and logprobs is not None:
        if logprobs > MAX_PROMPT_LOGPROBS:
            raise bad_field("echo", f"is available with at most {MAX_PROMPT_LOGPROBS} logprobs, got {logprobs}")
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    adjusted = structs.replace(
        sampling,
        logprobs=0 if picked else logprobs,
        logprob_token_ids=picked,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=details.token_ids,
        echo=echo,
    )
    return adjusted, details


def _read_picked(fields: Fields, sampling: SamplingParams, model: ServedModel, *, wanted: bool) -> tuple[int, ...]:
    """The tokens whose logprobs are shown in place of those of the most likely tokens."""
    ids = fields.array("logprob_token_ids", max_items=MAX_LOGPROB_TOKEN_IDS, items=token_id(model.vocab_size)) or []
    check_token_ids(ids, "logprob_token_ids", model.vocab_size)
    if ids and not wanted:
        raise bad_field("logprob_token_ids", "needs logprobs")
    if ids and sampling.beam_width:
        raise bad_field("logprob_token_ids", "is not available with use_beam_search")
    return tuple(dict.fromkeys(ids))


def _read_count(
    fields: Fields, name: str, default: int | None, model: ServedModel, *, most: int = INT32_MAX
) -> int | None:
    """The number of alternatives per token; -1: the whole vocabulary."""
    allowed = model.max_logprobs if model.max_logprobs >= 0 else model.vocab_size or INT32_MAX
    most = min(most, allowed)
    value = fields.integer(name, default, -1, INT32_MAX)
    if value == -1:
        value = model.vocab_size or INT32_MAX
        if value > most:
            problem = f"-1 asks for the {value} tokens of the vocabulary, but at most {most} are shown (--max-logprobs)"
            raise bad_field(name, problem)
    if value is not None and value > most:
        raise bad_field(name, f"must be at most {most} (--max-logprobs), got {shown(value)}")
    return value
