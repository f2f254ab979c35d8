"""A sequence that is about to be preempted, as described to those who may take it over."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Leaver:
    """A sequence that must give its blocks up. The first ``num_full`` of its ``num_computed`` tokens fill blocks that
    are listed; it holds ``num_pages``. To return to its replica, it needs the time in which ``cost_tokens`` tokens are
    computed."""

    sequence: Sequence
    num_computed: int
    num_full: int
    num_pages: int
    cost_tokens: float
