"""Hidden states of prompts for clients that asked: sums over chunks, put together to one vector per prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.detokenizer.text import Decoder
from pagebus.bus.messages import PromptReply, SequenceStarted, StepResult

Float32Array = NDArray[np.float32]


class PooledPrompt:
    """Collects the states of one prompt, from token ``first`` on, until all are there.

    After a preemption or the loss of an executor the prompt is computed anew, perhaps in other chunks. Known are
    therefore sums up to several places, and each chunk goes on from the one where it begins.
    """

    def __init__(self, started: SequenceStarted, first: int) -> None:
        self._started = started
        self._first = first
        self._end = started.num_prompt_tokens if started.pooled_until is None else started.pooled_until
        self._sums: dict[int, Float32Array] = {}
        """The sum [H] of the states of the tokens from ``first`` up to each of these places."""

    @property
    def complete(self) -> bool:
        return self._end in self._sums

    def add(self, start: int, length: int, states: Float32Array) -> None:
        """``states`` [H] is the sum over ``length`` tokens from position ``start`` on."""
        if start == self._first:
            self._sums[start + length] = states
        elif start in self._sums:
            self._sums[start + length] = self._sums[start] + states

    def reply(self, decoder: Decoder) -> PromptReply:
        """The message with the mean."""
        mean = self._sums[self._end] / np.float32(self._end - self._first)
        return PromptReply(request_id=self._started.request_id, text="", pooled_bits=mean.view(np.int32))


def add_pooled_parts(result: StepResult, prompt_of: Callable[[int], PooledPrompt | None]) -> list[int]:
    """Hand each sum in ``result`` to its collector; returns the sequence ids that got something. Raises ValueError for
    malformed columns."""
    ids = result.pooled_sequence_ids.tolist()
    if not ids:
        return []
    states = result.pooled_bits.view(np.float32).reshape(len(ids), -1)
    touched = []
    for sequence_id, start, length, state in zip(
        ids, result.pooled_starts.tolist(), result.pooled_lengths.tolist(), states, strict=True
    ):
        prompt = prompt_of(sequence_id)
        if prompt is not None:
            prompt.add(start, length, state)
            touched.append(sequence_id)
    return touched
