"""Messages about a request's sequences to its detokenizer, and about the request to its ingresses."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from pagebus.actors.scheduler.readers import Reader
from pagebus.actors.scheduler.request import BeamGroup, Request, Sequence
from pagebus.actors.scheduler.sequence_output import Scores, SequenceOutput
from pagebus.bus.messages import (
    PROMPT_TAIL_TOKENS,
    AlsoReads,
    Int32Array,
    RequestMoved,
    RequestTimed,
    SamplingParams,
    SequenceEnded,
    SequenceStarted,
)
from pagebus.bus.messages.field_types import no_ints


def started(sequence: Sequence) -> Iterator[SequenceStarted]:
    """Announcements of a sequence with all of its output so far; of a finished beam search, one per choice, best
    first."""
    if sequence.beam_group is None:
        tokens = sequence.tokens[len(sequence.request.prompt) :]
        output = SequenceOutput(tokens, sequence.end, sequence.scores)
        yield _started(sequence, sequence.id, sequence.choice_index, output)
        return
    choices = zip(sequence.beam_group.choice_ids, _beams(sequence.beam_group), strict=True)
    for choice_index, (choice_id, output) in enumerate(choices):
        yield _started(sequence, choice_id, choice_index, output)


def void(sequence: Sequence) -> Iterator[SequenceEnded]:
    """Messages that void earlier announcements of a sequence."""
    for sequence_id in (sequence.id,) if sequence.beam_group is None else sequence.beam_group.choice_ids:
        yield SequenceEnded(sequence_id=sequence_id, reason="abort")


def times_of(request: Request) -> RequestTimed:
    """The times of a request's stages."""
    return RequestTimed(
        request_id=request.id,
        taken_s=request.taken_s,
        tokenized_s=request.tokenized_s,
        started_s=request.started_s,
        first_token_s=request.first_token_s,
        ended_s=request.ended_s,
        num_preemptions=request.num_preemptions,
    )


def _beams(group: BeamGroup) -> Iterator[SequenceOutput]:
    """The choices of a beam search."""
    reports = group.leader.request.sampling.logprobs is not None
    for found in group.search.best(len(group.choice_ids)):
        scores = Scores()
        if reports:
            counts = np.full(len(found.tokens), found.top_ids.shape[1], np.int32)
            columns = (found.logprob_bits, counts, found.top_ids, found.top_bits)
            scores = Scores(*(array("i", np.ascontiguousarray(column, np.int32).tobytes()) for column in columns))
        yield SequenceOutput(array("i", found.tokens.tobytes()), found.end, scores)


def _started(sequence: Sequence, sequence_id: int, choice_index: int, output: SequenceOutput) -> SequenceStarted:
    request, sampling, scores = sequence.request, sequence.request.sampling, output.scores
    told = request.readers.told
    ingress, *others = (reader.ingress for reader in told)
    attempts = tuple(reader.attempt for reader in told)
    tells_prompt = sampling.returns_prompt and not sampling.pooling and choice_index == 0
    return SequenceStarted(
        request_id=request.id,
        sequence_id=sequence_id,
        choice_index=choice_index,
        ingress=ingress,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=sequence.request.num_cached or 0,
        max_tokens=sequence.limit - len(request.prompt),
        sampling=_for_text(sampling),
        arrived_s=request.arrived_s,
        prompt_tail=_ints(request.prompt[-PROMPT_TAIL_TOKENS:]),
        prompt_token_ids=_ints(request.prompt) if tells_prompt else no_ints(),
        output_end=output.end,
        output_token_ids=_ints(output.tokens),
        output_bits=_ints(scores.bits),
        output_top_counts=_ints(scores.top_counts),
        output_top_ids=_ints(scores.top_ids),
        output_top_bits=_ints(scores.top_bits),
        pooled_from=sequence.pooled_from,
        pooled_until=sequence.pooled_until,
        others=tuple(others),
        prediction_token_ids=_ints(request.prediction),
        attempts=attempts if any(attempts) else (),
    )


def _for_text(sampling: SamplingParams) -> SamplingParams:
    """Without large parameters that do not affect the text."""
    if not (sampling.grammar or sampling.allowed_tokens):
        return sampling
    return replace(sampling, grammar="", allowed_tokens="")


def _ints(values: array[int]) -> Int32Array:
    """A copy."""
    return np.frombuffer(values.tobytes(), np.int32) if values else no_ints()


def moved(request: Request) -> RequestMoved:
    """The journal's record of the ingresses that a request's clients read from."""
    newest = request.readers.newest
    others = tuple(_also_reads(each) for each in request.readers if each is not newest)
    asked = request.readers.asked
    return RequestMoved(
        request_id=request.id, ingress=newest.ingress, attempt=newest.attempt, asked=asked, others=others
    )


def _also_reads(reader: Reader) -> AlsoReads:
    return AlsoReads(ingress=reader.ingress, attempt=reader.attempt, asked=reader.asked)
