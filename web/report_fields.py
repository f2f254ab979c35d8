"""Reading the fields that say what an answer reports (:class:`web.report.Report`)."""

from __future__ import annotations

from dataclasses import replace

from bus.messages import SamplingParams
from web.errors import bad_field
from web.fields import Fields
from web.limits import MAX_LOGPROBS, MAX_N
from web.report import Report

PLAIN = Report()


def read_completion_report(
    fields: Fields, sampling: SamplingParams, *, echo: bool, prompt_only: bool, stream: bool
) -> tuple[SamplingParams, Report | None]:
    """The sampling parameters with what the report needs, and the report; None if it is plain."""
    best_of = fields.integer("best_of", sampling.n, 1, MAX_N)
    if best_of < sampling.n:
        raise bad_field("best_of", f"must be at least n ({sampling.n}), got {best_of}")
    if best_of > sampling.n and stream:
        raise bad_field("best_of", "must not be more than n when stream is true: the best are known only at the end")
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    asked, report = _read(fields, sampling, logprobs, stream=stream, echo=echo)
    asked, report = replace(asked, n=best_of), replace(report, prompt_only=prompt_only)
    if best_of > sampling.n and logprobs is None:
        asked = replace(asked, logprobs=0)  # to tell which are the best
    if prompt_only:
        asked = replace(asked, max_tokens=1, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    plain = best_of == sampling.n and report == replace(PLAIN, num_choices=sampling.n)
    return asked, None if plain else report


def read_chat_report(fields: Fields, sampling: SamplingParams, *, stream: bool) -> tuple[SamplingParams, Report | None]:
    """As for completions, in the chat's own fields."""
    wanted = fields.boolean("logprobs", False)
    num_top = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if num_top and not wanted:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    asked, report = _read(fields, sampling, num_top if wanted else None, stream=stream, echo=False)
    return asked, None if report == replace(PLAIN, num_choices=sampling.n) else report


def _read(
    fields: Fields, sampling: SamplingParams, logprobs: int | None, *, stream: bool, echo: bool
) -> tuple[SamplingParams, Report]:
    prompt_logprobs = fields.integer("prompt_logprobs", None, 0, MAX_LOGPROBS)
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
