"""A view of the live leases, refreshed twice a second: which actors exist, and which are missing to answer requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagebus.actors.runtime.health_check import is_stalled
from pagebus.actors.telemetry.progress import graphs_of
from pagebus.bus.contract import Bus, LeaseInfo
from pagebus.web.observatory.roster import hold_of

REFRESH_S = 0.5
FRESH_S = 2.5
"""A view older than this is unreliable: the bus does not answer, and new requests would wait for it."""
EAGER_REFRESH_S = 0.05
"""Seconds between refreshes while an actor is missing."""
RANK = "rank"
"""The kind of ranks besides an executor, which is rank 0."""
NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")


class Membership:
    """The view of one ingress. It is stale, and the bus counts as missing, once it is older than ``fresh_s``."""

    def __init__(self, bus: Bus, *, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._fresh_s = fresh_s
        self._clock = clock
        self._refreshed_s: float | None = None
        self.leases: Sequence[LeaseInfo] = ()

    async def refresh(self) -> None:
        """Refresh the view.

        Raises:
            BusUnavailable: the bus does not answer; the old view stays and grows stale.
        """
        self.leases = await self._bus.leases()
        self._refreshed_s = self._clock()

    def missing(self) -> tuple[str, ...]:
        """What prevents requests from being answered: ``bus``, or kinds of actors of which none is ready. Empty:
        nothing."""
        if self._refreshed_s is None or self._clock() - self._refreshed_s > self._fresh_s:
            return ("bus",)
        ready = {
            lease.kind for lease in self.leases if lease.info.get("state") == "ready" and not is_stalled(lease.info)
        }
        return tuple(kind for kind in NEEDED if kind not in ready)

    @property
    def max_prompt_chars(self) -> int | None:
        """The most characters of a text that can fit into the context, as the tokenizers report; None: not all of them
        do."""
        told = [lease.info.get("max_prompt_chars") for lease in self.leases if lease.kind == "tokenizer"]
        known = [most for most in told if isinstance(most, int)]
        return max(known) if known and len(known) == len(told) else None

    def others_listen(self, own: str, port: int | None) -> bool:
        """Whether other ingresses of this machine than our ``own`` take requests at the same port."""
        there = {"state": "ready", "host": socket.gethostname(), "port": port}.items()
        others = [lease for lease in self.leases if lease.kind == "ingress" and lease.name != own]
        return any(there <= lease.info.items() for lease in others)

    def progressing(self) -> bool:
        """Whether every executor with steps to compute makes progress; neither busy nor idle counts as stalled."""
        return not any(is_stalled(lease.info) for lease in self.leases)

    @property
    def is_held(self) -> bool:
        """Whether an operator has paused the work."""
        return bool(hold_of(self.leases))

    def states(self) -> dict[str, dict[str, object]]:
        """States for display: kind -> name -> what the actor reports as its state. Ranks are there if there are any."""
        view: dict[str, dict[str, object]] = {kind: {} for kind in NEEDED}
        for lease in self.leases:
            if lease.kind == RANK:
                view.setdefault(RANK, {})
            if lease.kind in view:
                view[lease.kind][lease.name] = _state(lease.info)
        return view


def _state(info: Mapping[str, Any]) -> object:
    state, progress, graphs = info.get("state"), info.get("progress"), graphs_of(info)
    if is_stalled(info):
        return f"stalled for {info['stalled_s']} s"
    if state == "loading" and isinstance(progress, float):
        return f"loading ({progress:.0%})"
    if state == "ready" and graphs is not None and graphs[0] < graphs[1]:
        return f"ready ({graphs[0]} of {graphs[1]} graphs)"
    return state
