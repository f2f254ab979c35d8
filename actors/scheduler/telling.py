"""What a request's detokenizer is told of its sequences: that they start, what beams said, that they are over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actors.scheduler.lanes import Lanes
from actors.scheduler.sequence import Request, Sequence
from bus.messages import PROMPT_TAIL_TOKENS, SequenceEnded, SequenceStarted, SequenceTokens


def started(request: Request, sequence: Sequence) -> Iterator[SequenceStarted]:
    """A sequence is about to be computed; of a beam search all choices are."""
    if sequence.lanes is None:
        yield _started(request, sequence, sequence.id, sequence.choice_index)
        return
    for choice_index, choice_id in enumerate(sequence.lanes.choice_ids):
        yield _started(request, sequence, choice_id, choice_index)


def aborted(sequence: Sequence) -> Iterator[SequenceEnded]:
    """A sequence that was started is over, and its client does not wait."""
    for sequence_id in (sequence.id,) if sequence.lanes is None else sequence.lanes.choice_ids:
        yield SequenceEnded(sequence_id=sequence_id, reason="abort")


def beams(lanes: Lanes) -> Iterator[SequenceTokens]:
    """The search is over: its choices, best first."""
    reports = lanes.leader.request.sampling.logprobs is not None
    best = lanes.search.best(len(lanes.choice_ids))
    for choice_id, found in zip(lanes.choice_ids, best, strict=True):
        yield SequenceTokens(
            sequence_id=choice_id,
            end=found.end,
            num_top=found.top_ids.shape[1],
            token_ids=found.tokens,
            logprob_bits=found.logprob_bits if reports else found.logprob_bits[:0],
            top_ids=found.top_ids.ravel(),
            top_bits=found.top_bits.ravel(),
        )


def _started(request: Request, sequence: Sequence, sequence_id: int, choice_index: int) -> SequenceStarted:
    sampling = request.sampling
    tells_prompt = sampling.returns_prompt and choice_index == 0
    return SequenceStarted(
        request_id=request.id,
        sequence_id=sequence_id,
        choice_index=choice_index,
        ingress=request.ingress,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=request.num_cached or 0,
        max_tokens=sequence.limit - len(request.prompt),
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        arrived_s=request.arrived_s,
        prompt_tail=np.array(request.prompt[-PROMPT_TAIL_TOKENS:], np.int32),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        return_token_ids=sampling.return_token_ids,
        prompt_token_ids=np.array(request.prompt if tells_prompt else (), np.int32),
    )
