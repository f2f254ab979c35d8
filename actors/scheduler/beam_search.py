"""Beam search: chooses among continuations, step by step. Arrays in, arrays out; no slots, no blocks.

The search is that of transformers' ``generate(num_beams=width, do_sample=False)``, so both find the same beams:

* A beam's running score is the sum of the log probabilities of its tokens. Each step ranks all continuations of all
  beams by it. Those among the best ``width`` that end (an end token, or ``max_tokens`` reached) are *finished*; the
  best ``width`` that do not end continue.
* A finished beam scores ``sum / num_tokens ** length_penalty``, its end token included. The best ``width`` are kept.
* With ``width`` finished beams, ``early_stopping`` decides. False: the search ends as soon as the best running beam,
  were it to end now, would not beat the worst finished one. True: it ends at once. "never": it ends only if ending at
  ``max_tokens`` could not beat it either, where longer is better. At ``max_tokens`` it always ends.

vLLM differs in three points: it never stops before ``max_tokens``; a beam may end from any rank, not only from the best
``width``; and lengths in scores count the prompt and not the end token. It computes more, and prefers other lengths.

A step stores one row per beam that continues or has ended in it, with the row of its parent in the step before. A beam
is read backwards from its last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages import END_LENGTH, END_STOP, Int32Array

Float32Array = NDArray[np.float32]
Count = TypeVar("Count", int, NDArray[np.int64])
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The beams that go on, best first: beam i continues ``parents[i]`` [width] of those before with ``tokens[i]``."""

    parents: Int32Array
    tokens: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished beam of T tokens: the bits of each one's log probability, and of the ``num_top`` most likely tokens in
    its place [T, num_top], with theirs. ``end`` is END_STOP or END_LENGTH."""

    score: float
    end: int
    tokens: Int32Array
    logprob_bits: Int32Array
    top_ids: Int32Array
    top_bits: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Rows [r] of one step, running beams first; ``tops`` [beams before, num_top] ids and bits."""

    parents: Int32Array
    tokens: Int32Array
    bits: Int32Array
    top_ids: Int32Array
    top_bits: Int32Array


@dataclass(frozen=True, slots=True)
class _Finished:
    """A row in which a beam has ended."""

    score: float
    end: int
    step: int
    row: int


class BeamSearch:
    """The state of one search.

    Args:
        width: beams that go on, and finished ones that are kept.
        end_ids: tokens that end a beam, from output index ``min_tokens`` on.
        num_top: how many alternatives per token :meth:`best` reports.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_ids: tuple[int, ...] = (),
        *,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        num_top: int = 0,
    ) -> None:
        self.width = width
        self.max_tokens = max_tokens
        self.scores = np.zeros(1, np.float32)
        """Of the running beams, best first: one before the first step, ``width`` after it."""
        self.done = False
        self._end_ids = np.array(sorted(set(end_ids)), np.int32)
        self._min_tokens = min_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_top = num_top
        self._steps: list[_Step] = []
        self._finished: list[_Finished] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of each running beam."""
        return len(self._steps)

    def limit_to(self, max_tokens: int) -> None:
        """End all beams there at the latest."""
        self.max_tokens = max_tokens

    @property
    def num_candidates(self) -> int:
        """How many of the most likely tokens of each beam a step needs: ``width`` must be left if all end tokens are
        among them."""
        return max(self.width + len(self._end_ids), self._num_top)

    def choose(self, top_ids: Int32Array, top_bits: Int32Array) -> Chosen | None:
        """One step: the most likely tokens of each running beam and their log probabilities (float32 bits) [beams, k],
        k at least :attr:`num_candidates`, most likely first. None: the search is over, see :meth:`best`."""
        num_tokens, k = self.num_tokens + 1, top_ids.shape[1]
        logprobs = top_bits.view(np.float32)
        totals = (self.scores[:, None] + np.where(np.isnan(logprobs), np.float32(-np.inf), logprobs)).ravel()
        ends = np.isin(top_ids, self._end_ids).ravel()
        order = np.argsort(-totals, kind="stable")
        if num_tokens <= self._min_tokens:
            order = order[~ends[order]]
        hits = ends[order] if num_tokens < self.max_tokens else np.ones(len(order), np.bool_)
        going = order[~hits][: self.width]
        ended = order[: self.width][hits[: self.width]]
        kept = np.concatenate((going, ended))
        tops = slice(0, self._num_top)
        step = _Step(
            parents=(kept // k).astype(np.int32),
            tokens=top_ids.ravel()[kept],
            bits=top_bits.ravel()[kept],
            top_ids=top_ids[:, tops].copy(),
            top_bits=top_bits[:, tops].copy(),
        )
        self._steps.append(step)
        self._finish(ended, totals, ends, first_row=len(going))
        self.scores = totals[going]
        self.done = num_tokens >= self.max_tokens or self._is_decided()
        return None if self.done else Chosen(step.parents[: len(going)], step.tokens[: len(going)])

    def running(self) -> Int32Array:
        """The tokens of the running beams [beams, num_tokens]."""
        rows = np.arange(len(self.scores), dtype=np.int32)
        tokens = np.empty((len(rows), self.num_tokens), np.int32)
        for place in reversed(range(self.num_tokens)):
            step = self._steps[place]
            tokens[:, place] = step.tokens[rows]
            rows = step.parents[rows]
        return tokens

    def best(self, count: int) -> list[Hypothesis]:
        """The ``count`` best finished beams, best first."""
        return [self._read(finished) for finished in self._finished[:count]]

    def _finish(self, ended: NDArray[np.intp], totals: Float32Array, ends: NDArray[np.bool_], first_row: int) -> None:
        """Take beams in that have just ended; of equal scores the earlier stands first."""
        if not len(ended):
            return
        divisor = self.num_tokens**self._length_penalty
        for row, candidate in enumerate(ended.tolist(), first_row):
            end = END_STOP if ends[candidate] else END_LENGTH
            self._finished.append(_Finished(float(totals[candidate]) / divisor, end, self.num_tokens - 1, row))
        self._finished.sort(key=lambda each: -each.score)
        del self._finished[self.width :]

    def _is_decided(self) -> bool:
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        divisor = (self.max_tokens if longest else self.num_tokens) ** self._length_penalty
        return not float(self.scores[0]) / divisor > self._finished[-1].score

    def _read(self, finished: _Finished) -> Hypothesis:
        length, row = finished.step + 1, finished.row
        tokens, bits = np.empty(length, np.int32), np.empty(length, np.int32)
        top_ids = np.empty((length, self._num_top), np.int32)
        top_bits = np.empty((length, self._num_top), np.int32)
        for place in reversed(range(length)):
            step = self._steps[place]
            tokens[place], bits[place] = step.tokens[row], step.bits[row]
            row = int(step.parents[row])
            top_ids[place], top_bits[place] = step.top_ids[row], step.top_bits[row]
        return Hypothesis(finished.score, finished.end, tokens, bits, top_ids, top_bits)


def peak_blocks(num_prompt: int, num_tokens: Count, width: int, block_size: int) -> Count:
    """Blocks that ``num_tokens`` computed tokens of each of ``width`` beams take at most: the full blocks of the prompt
    exist once, everything behind them once per beam."""
    shared = num_prompt // block_size
    return shared + width * (-(-num_tokens // block_size) - shared)
