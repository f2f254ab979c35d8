"""Reading the fields that say what an answer reports (:class:`web.report.Report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bus.messages import SamplingParams
from web.errors import bad_field
from web.fields import Fields
from web.limits import MAX_LOGPROBS, MAX_N
from web.parsing.output import Parsing
from web.report import Report


def read_completion_report(
    fields: Fields, sampling: SamplingParams, *, echo: bool, prompt_only: bool, stream: bool
) -> tuple[SamplingParams, Report | None]:
    """The sampling parameters with what the report needs, and the report; None if it is plain."""
    best_of = fields.integer("best_of", sampling.n, 1, MAX_N)
    if best_of < sampling.n:
        raise bad_field("best_of", f"must be at least n ({sampling.n}), got {best_of}")
    if best_of > sampling.n and stream:
        raise bad_field("best_of", "must not be more than n when stream is true: the best are known only at the end")
    logprobs = _read_count(fields, "logprobs")
    asked, report = _read(fields, sampling, logprobs, stream=stream, echo=echo)
    if sampling.beam_width:  # the search itself gives the best
        asked, best_of = replace(asked, beam_width=best_of), sampling.n
    if best_of > sampling.n:
        # How likely each is tells which are the best.
        asked = replace(asked, n=best_of, logprobs=0 if logprobs is None else logprobs)
    if prompt_only:
        report = replace(report, prompt_only=True)
        asked = replace(asked, max_tokens=1, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    plain = best_of == sampling.n and report == Report(num_choices=sampling.n)
    return asked, None if plain else report


def read_chat_report(
    fields: Fields,
    sampling: SamplingParams,
    messages: Sequence[Mapping[str, Any]],
    parsing: Parsing | None,
    *,
    stream: bool,
) -> tuple[SamplingParams, Report | None]:
    """As for completions, in the chat's own fields. ``echo`` is about what the assistant has said already, if the last
    message is its own."""
    wanted = fields.boolean("logprobs", False)
    num_top = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if num_top and not wanted:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    asked, report = _read(fields, sampling, num_top if wanted else None, stream=stream, echo=False)
    if parsing is not None:
        report = replace(report, parsing=parsing)
    if fields.boolean("echo", False) and messages[-1]["role"] == "assistant":
        report = replace(report, said=messages[-1]["content"])
    return asked, None if report == Report(num_choices=sampling.n) else report


def _read(
    fields: Fields, sampling: SamplingParams, logprobs: int | None, *, stream: bool, echo: bool
) -> tuple[SamplingParams, Report]:
    prompt_logprobs = _read_count(fields, "prompt_logprobs")
    if fields.take("logprob_token_ids", {"enum": [[]]}) not in (None, []):
        problem = "is not available: logprobs tells each token's own log probability and the most likely tokens'"
        raise bad_field("logprob_token_ids", problem, code="unsupported_parameter")
    if prompt_logprobs is not None and stream:
        raise bad_field("prompt_logprobs", "is not available when stream is true")
    report = Report(
        num_choices=sampling.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
    )
    if report == Report(num_choices=sampling.n):
        return sampling, report
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    asked = replace(
        sampling,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=report.token_ids,
        echo=echo,
    )
    return asked, report


def _read_count(fields: Fields, name: str) -> int | None:
    """How many alternatives per token."""
    if fields.peek(name) == -1:
        problem = f"-1 (the whole vocabulary) is not available: ask for 0 to {MAX_LOGPROBS} of the most likely tokens"
        raise bad_field(name, problem)
    return fields.integer(name, None, 0, MAX_LOGPROBS)
