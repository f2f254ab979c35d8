"""A sequence that is preempted, for whoever may take it over."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Leaver:
    """A sequence that has to give its blocks up. Of its ``num_computed`` tokens the first ``num_full`` fill blocks that
    can be found; it holds ``num_pages``. To return it takes as long as ``cost_tokens`` are computed in."""

    sequence: Sequence
    num_computed: int
    num_full: int
    num_pages: int
    cost_tokens: float
