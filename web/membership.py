"""Who is there: a view of the live leases, refreshed twice a second, and what is missing for an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bus.contract import Bus, LeaseInfo

REFRESH_S = 0.5
EAGER_REFRESH_S = 0.05
"""While somebody is missing."""
NEEDED = ("tokenizer", "scheduler", "executor", "detokenizer")
WATCHED = ("scheduler", "detokenizer", "ingress")
"""Kinds whose loss may strand open requests. Of ingresses only this one: without its lease its requests are aborted."""


class Membership:
    """The view of one ingress. It is stale, and the bus counts as missing, once it is older than ``fresh_s``."""

    def __init__(self, bus: Bus, ingress: str, *, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._ingress = ingress
        self._fresh_s = fresh_s
        self._clock = clock
        self._refreshed_s: float | None = None
        self._watched: dict[tuple[str, str], int] = {}
        self.leases: Sequence[LeaseInfo] = ()
        self.losses = 0
        """How often a watched actor has disappeared or was replaced."""

    async def refresh(self) -> None:
        """Look again.

        Raises:
            BusUnavailable: the bus does not answer; the old view stays and grows stale.
        """
        leases = await self._bus.leases()
        watched = {
            (lease.kind, lease.name): lease.epoch
            for lease in leases
            if lease.kind in WATCHED and (lease.kind != "ingress" or lease.name == self._ingress)
        }
        self.losses += sum(watched.get(actor) != epoch for actor, epoch in self._watched.items())
        self._watched = watched
        self.leases = leases
        self._refreshed_s = self._clock()

    def missing(self) -> tuple[str, ...]:
        """What keeps a request from being answered: ``bus``, or kinds of which no actor is ready. Empty: nothing."""
        if self._refreshed_s is None or self._clock() - self._refreshed_s > self._fresh_s:
            return ("bus",)
        ready = {lease.kind for lease in self.leases if lease.info.get("state") == "ready"}
        return tuple(kind for kind in NEEDED if kind not in ready)

    def states(self) -> dict[str, dict[str, object]]:
        """For people: kind -> name -> what the actor says its state is."""
        view: dict[str, dict[str, object]] = {kind: {} for kind in NEEDED}
        for lease in self.leases:
            if lease.kind in view:
                progress = lease.info.get("progress")
                state = lease.info.get("state")
                loading = state == "loading" and isinstance(progress, float)
                view[lease.kind][lease.name] = f"loading ({progress:.0%})" if loading else state
        return view
