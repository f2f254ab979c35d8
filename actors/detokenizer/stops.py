"""Stop strings in a growing text: where the first one ends, and how much text must wait meanwhile.

One automaton per stop string (Knuth, Morris and Pratt) reads each character once. Its state is the length of the
longest beginning of the stop string that the text so far ends with: that many characters may become a stop string and
are held back, no more. The match that ends first wins, of several that end together the longest; so the result
depends on the text alone, never on how it was cut into deltas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``text`` is what may still be given out, up to and including the match if asked for; ``stop`` is what matched."""

    text: str
    stop: str


class StopMatcher:
    """The stop strings of one sequence. Empty strings are ignored."""

    __slots__ = ("_failures", "_firsts", "_held", "_include", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._failures = tuple(_failures(stop) for stop in self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include

    def push(self, text: str, *, active: bool = True) -> str | StopMatch:
        """Add text; returns what can be given out now, or the match that ends the sequence.

        While not ``active`` (``min_tokens`` is not reached) a stop string that ends in ``text`` does not count, but one
        that begins in it does.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text
        whole = self._held + text
        for end in range(len(self._held) + 1, len(whole) + 1):
            match = self._step(whole[end - 1])
            if match and active:
                cut = end if self._include else end - len(match)
                return StopMatch(whole[:cut], match)
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Read one character; returns the longest stop string that ends with it, or nothing."""
        match = ""
        for i, stop in enumerate(self._stops):
            state, failures = self._states[i], self._failures[i]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                match = max(match, stop, key=len)
                state = failures[state - 1]
            self._states[i] = state
        return match


@lru_cache(maxsize=1024)
def _failures(stop: str) -> tuple[int, ...]:
    """For each beginning of ``stop``: the length of its longest proper beginning that is also its end."""
    lengths = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[k] != stop[i]:
            k = lengths[k - 1]
        if stop[k] == stop[i]:
            k += 1
        lengths[i] = k
    return tuple(lengths)
