"""The sequences a detokenizer has under way: tokens in, text and ends out. No bus, no clock.

Every sequence gets exactly one end: a terminal row in a :class:`ReplyBatch`, or one :class:`RequestFailed` for its
whole request, or nothing if the scheduler says that its client is gone. What comes for a sequence after its end is
ignored, as are tokens that came before (a replica that was replaced may repeat them). A sequence that had begun
elsewhere brings its tokens along, and its text is made from the first of them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pagebus.actors.detokenizer.pooling import PooledPrompt, add_pooled_parts
from pagebus.actors.detokenizer.prediction import PredictionMatcher
from pagebus.actors.detokenizer.repetition import RepetitionDetector
from pagebus.actors.detokenizer.scores import (
    PromptScores,
    Score,
    UnsentTokens,
    add_prompt_parts,
    output_scores,
    row_scores,
)
from pagebus.actors.detokenizer.state import SequenceState, reply_batch
from pagebus.actors.detokenizer.stops import StopMatch, StopMatcher
from pagebus.actors.detokenizer.text import Decoder
from pagebus.bus.messages import (
    END_GRAMMAR,
    END_LENGTH,
    END_NONE,
    END_STOP,
    AbortRequest,
    FinishReason,
    PromptReply,
    ReplyBatch,
    RequestFailed,
    SequenceEnded,
    SequenceStarted,
    StepResult,
    StopSequence,
)

INTERNAL_ERROR = "InternalServerError"
REPETITION = "repetition_detected"
"""The stop reason of an output that repeats itself."""
BAD_REQUEST = "BadRequestError"
NO_TEXT = "the server failed to make text of this request"
COSTLY_GRAMMAR = "turned out to be too complex to follow, or to leave no token that may come next"


_Row = tuple[SequenceState, int, int, Score | None]
"""A token of a sequence: which one, the id, how it ends the sequence, its log probabilities."""

ToldPrompt = TypeVar("ToldPrompt", PromptScores, PooledPrompt)


@dataclass(slots=True)
class Output:
    """What is to be published after some input."""

    replies: dict[str, ReplyBatch] = field(default_factory=dict)
    """One batch per ingress name."""
    prompts: list[tuple[str, PromptReply]] = field(default_factory=list)
    """(ingress name, message); they go out before the batches."""
    failures: list[tuple[str, RequestFailed]] = field(default_factory=list)
    """(ingress name, terminal message)."""
    controls: list[StopSequence | AbortRequest] = field(default_factory=list)
    copies: list[tuple[str, ReplyBatch | PromptReply | RequestFailed]] = field(default_factory=list)
    """(ingress name, message) of requests that are read at several, in their order; they go out after the others."""


class Sequences:
    """All live sequences of one detokenizer. Feed messages, then :meth:`take` what they gave."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._live: dict[int, SequenceState] = {}
        self._by_request: dict[str, list[int]] = {}
        self._touched: dict[int, SequenceState] = {}
        self._early: list[tuple[int, int, int, int, Score | None]] = []
        self._output = Output()
        self.num_tokens = 0
        """Tokens taken in, ever."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> bool:
        """Whether tokens have come whose predecessors have not."""
        return bool(self._early)

    def start(self, message: SequenceStarted) -> None:
        """A sequence begins; a repeat of a live one changes nothing."""
        if message.sequence_id in self._live:
            return
        sampling = message.sampling
        text = self._decoder.begin(
            message.prompt_tail.tolist(),
            skip_special=sampling.skip_special_tokens,
            spaces=sampling.spaces_between_special_tokens,
        )
        stops = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output) if any(sampling.stop) else None
        repetition, predicted = sampling.repetition_detection, message.prediction_token_ids
        state = SequenceState(
            message,
            text,
            stops,
            tokens=UnsentTokens() if sampling.return_token_ids or sampling.logprobs is not None else None,
            prompt=_prompt_of(message),
            repetition=None if repetition is None else RepetitionDetector(repetition),
            prediction=PredictionMatcher(predicted.tolist()) if len(predicted) else None,
        )
        self._live[message.sequence_id] = state
        self._by_request.setdefault(message.request_id, []).append(message.sequence_id)
        if isinstance(state.prompt, PromptScores):
            self._tell_prompt(state)
        self._replay(state)

    def refuse(self, message: SequenceStarted) -> None:
        """Nothing can be made of this sequence: its request ends with an error."""
        self._give_up(message, NO_TEXT)

    def refuse_step(self, result: StepResult) -> None:
        """Nothing can be made of this step: the requests in it end with an error. Its tokens may be their last, so no
        gap would show."""
        for column in (result.prompt_sequence_ids, result.pooled_sequence_ids, result.sequence_ids):
            for sequence_id in column.tolist():
                if (state := self._live.get(sequence_id)) is not None:
                    self._fail(state, NO_TEXT)

    def _replay(self, state: SequenceState) -> None:
        """Work off the tokens that a sequence brings along."""
        if state.started.output_end == END_GRAMMAR:
            self._refuse_grammar(state)
            return
        tokens = state.started.output_token_ids.tolist()
        scores = output_scores(state.started)
        for index, token in enumerate(tokens):
            end = state.started.output_end if index == len(tokens) - 1 else END_NONE
            self._advance([(state, token, end, scores[index] if index < len(scores) else None)])

    def void(self) -> None:
        """Forget all sequences: they are the old scheduler's."""
        self._live.clear()
        self._by_request.clear()
        self._touched.clear()
        self._early.clear()

    def end(self, message: SequenceEnded) -> None:
        """The scheduler ends a sequence: silently (abort), with an error for its request, or as finished."""
        state = self._live.get(message.sequence_id)
        if state is None:
            return
        if message.reason == "error":
            self._fail(state, message.message or "the request could not be completed")
        elif message.reason == "abort":
            self._touched.pop(message.sequence_id, None)
            self._remove(state)
        else:
            self._finish(state, message.reason, None)

    def apply(self, result: StepResult) -> None:
        """The tokens of one step, all sequences at once."""
        rows: list[_Row] = []
        if len(result.prompt_sequence_ids) or len(result.pooled_sequence_ids):
            self._take_prompts(result)
        if (result.ends == END_GRAMMAR).any():
            for sequence_id in result.sequence_ids[result.ends == END_GRAMMAR].tolist():
                if (state := self._live.get(sequence_id)) is not None:
                    self._refuse_grammar(state)
        ids, tokens = result.sequence_ids.tolist(), result.token_ids.tolist()
        scores: dict[int, Score] = {}
        if len(result.logprob_rows):
            scores = row_scores(result, {row for row, each in enumerate(ids) if each in self._live})
        indexes, ends = result.token_indexes.tolist(), result.ends.tolist()
        in_rows: set[int] = set()
        for row, (sequence_id, token, index, end) in enumerate(zip(ids, tokens, indexes, ends, strict=True)):
            if sequence_id in in_rows:  # several tokens of one sequence: one after the other
                self._advance(rows)
                rows, in_rows = [], set()
            state = self._live.get(sequence_id)
            if state is None or index < state.num_tokens:
                continue
            if index > state.num_tokens:
                self._early.append((index, sequence_id, token, end, scores.get(row)))
                continue
            rows.append((state, token, end, scores.get(row)))
            in_rows.add(sequence_id)
        self._advance(rows)

    def settle(self, *, complete: bool) -> None:
        """Work off tokens that were read before their predecessors: those lay in the stream of another replica.

        ``complete`` says that everything written before them has been read, so what is still missing is lost.
        """
        early, self._early = sorted(self._early, key=lambda row: row[:2]), []
        for row in early:
            index, sequence_id, token, end, score = row
            state = self._live.get(sequence_id)
            if state is None or index < state.num_tokens:
                continue
            if index == state.num_tokens:
                self._advance([(state, token, end, score)])
            elif complete:
                self._fail(state, f"tokens {state.num_tokens} to {index - 1} of the output were lost")
            else:
                self._early.append(row)

    def take(self) -> Output:
        """Everything to publish since the last call."""
        output, self._output = self._output, Output()
        by_ingress: dict[str, list[SequenceState]] = {}
        shared: dict[tuple[str, ...], list[SequenceState]] = {}
        for state in self._touched.values():
            if state.started.others:
                shared.setdefault(state.ingresses, []).append(state)
            else:
                by_ingress.setdefault(state.started.ingress, []).append(state)
        self._touched = {}
        output.replies = {ingress: reply_batch(states, self._decoder) for ingress, states in by_ingress.items()}
        for ingresses, states in shared.items():
            batch = reply_batch(states, self._decoder)
            output.copies += [(ingress, batch) for ingress in ingresses]
        return output

    def _take_prompts(self, result: StepResult) -> None:
        """Log probabilities and states of parts of prompts."""
        scored, pooled = partial(self._prompt, PromptScores), partial(self._prompt, PooledPrompt)
        for sequence_id in add_prompt_parts(result, scored) + add_pooled_parts(result, pooled):
            self._tell_prompt(self._live[sequence_id])

    def _prompt(self, kind: type[ToldPrompt], sequence_id: int) -> ToldPrompt | None:
        """What is to be said about the prompt of a live sequence, if it is of this kind."""
        state = self._live.get(sequence_id)
        return state.prompt if state is not None and isinstance(state.prompt, kind) else None

    def _tell_prompt(self, state: SequenceState) -> None:
        """Send what is to be said about the prompt, once it is all there."""
        if state.prompt is not None and state.prompt.complete:
            reply = state.prompt.reply(self._decoder)
            self._output.prompts.append((state.started.ingress, reply))
            self._output.copies += [(ingress, reply) for ingress in state.started.others]
            state.prompt_told()

    def _advance(self, rows: list[_Row]) -> None:
        """One token each for different live sequences: text, stop strings, ends."""
        live = [row for row in rows if row[0].started.sequence_id in self._live]  # a request may have failed meanwhile
        texts = iter(
            self._decoder.push(
                [state.text for state, _, end, _ in live if not state.is_silent(end)],
                [token for state, token, end, _ in live if not state.is_silent(end)],
            )
        )
        for state, token, end, score in live:
            if state.tokens is not None:
                state.tokens.ids.append(token)
                state.tokens.scores.append(score)
            if state.prediction is not None:
                state.prediction.push(token)
            text = "" if state.is_silent(end) else next(texts)
            state.num_tokens += 1
            self._touched[state.started.sequence_id] = state
            self._add_text(state, text)
            if end != END_NONE and state.finish_reason is None:
                stop_token = end == END_STOP and token in state.started.sampling.stop_token_ids
                self._finish(state, "length" if end == END_LENGTH else "stop", token if stop_token else None)
            elif state.repetition is not None and state.finish_reason is None:
                self._look_for_repetition(state, state.repetition, token)
        self.num_tokens += len(live)

    def _look_for_repetition(self, state: SequenceState, detector: RepetitionDetector, token: int) -> None:
        """End the sequence here if it repeats itself; what is computed of it meanwhile is of no use."""
        if detector.push(token) and state.num_tokens >= state.started.sampling.min_tokens:
            self._finish(state, "repetition", REPETITION)
            self._stop(state)

    def _stop(self, state: SequenceState) -> None:
        """Have the scheduler end a sequence that has ended here."""
        started = state.started
        stop = StopSequence(request_id=started.request_id, sequence_id=started.sequence_id)
        self._output.controls.append(stop)

    def _add_text(self, state: SequenceState, text: str) -> None:
        """Settled text: give out what cannot belong to a stop string; end the sequence at one."""
        if state.stops is None:
            state.unsent.append(text)
            return
        active = state.num_tokens > state.started.sampling.min_tokens
        given = state.stops.push(text, active=active)
        if isinstance(given, StopMatch):
            state.unsent.append(given.text)
            self._close(state, "stop", given.stop)
            self._stop(state)
        else:
            state.unsent.append(given)

    def _finish(self, state: SequenceState, reason: FinishReason, stop_reason: str | int | None) -> None:
        """The sequence is over: flush what was held back, which may still hold a stop string."""
        tail = self._decoder.finish(state.text)
        given: str | StopMatch = tail
        if state.stops is not None:
            given = state.stops.push(tail, active=state.num_tokens > state.started.sampling.min_tokens)
        if isinstance(given, StopMatch):
            state.unsent.append(given.text)
            self._close(state, "stop", given.stop)
            return
        state.unsent.append(given if state.stops is None else given + state.stops.finish())
        self._close(state, reason, stop_reason)

    def _close(self, state: SequenceState, reason: FinishReason, stop_reason: str | int | None) -> None:
        state.finish(reason, stop_reason)
        self._touched[state.started.sequence_id] = state
        self._remove(state)

    def _fail(self, state: SequenceState, message: str) -> None:
        self._give_up(state.started, message)

    def _refuse_grammar(self, state: SequenceState) -> None:
        """The client wrote what cannot be followed any further: the error is the client's."""
        field = state.started.sampling.grammar_field
        text = f"{field or 'the grammar'}: {COSTLY_GRAMMAR}"
        self._give_up(state.started, text, (400, BAD_REQUEST), field or None)

    def _give_up(
        self,
        started: SequenceStarted,
        message: str,
        kind: tuple[int, str] = (500, INTERNAL_ERROR),
        field: str | None = None,
    ) -> None:
        """End the whole request with an error of that status and type, once at each ingress, and have the scheduler
        drop what is left of it, unless a client has asked anew meanwhile. ``field``: the one at fault."""
        request_id = started.request_id
        for sequence_id in list(self._by_request.get(request_id, ())):
            self._touched.pop(sequence_id, None)
            self._remove(self._live[sequence_id])
        status, error_type = kind
        failure = RequestFailed(
            request_id=request_id, status=status, error_type=error_type, message=message, param=field
        )
        self._output.failures.append((started.ingress, failure))
        self._output.copies += [(ingress, failure) for ingress in started.others]
        for attempt in started.attempts or ("",):
            self._output.controls.append(AbortRequest(request_id=request_id, reason=message, attempt=attempt))

    def _remove(self, state: SequenceState) -> None:
        started = state.started
        del self._live[started.sequence_id]
        siblings = self._by_request[started.request_id]
        siblings.remove(started.sequence_id)
        if not siblings:
            del self._by_request[started.request_id]


def _prompt_of(message: SequenceStarted) -> PromptScores | PooledPrompt | None:
    """What is to be said about the prompt, if anything."""
    if message.pooled_from is not None:
        return PooledPrompt(message, message.pooled_from)
    return PromptScores(message) if len(message.prompt_token_ids) else None
