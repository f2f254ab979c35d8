"""Fair shares of clients by weight: start-time fair queueing (Goyal, Vin and Cheng, 1996) over the existing order.

Each client has a clock that advances by ``tokens / (RATE * weight)`` seconds per request. A request *starts* on that
clock when the client's previous one ends, but not before the *virtual time*: the latest start of any request that has
got a slot. The start replaces the time of arrival in the order (:mod:`pagebus.actors.scheduler.order`). It is known on
arrival, so the order stays static.

While several clients have requests waiting, they therefore get tokens in proportion to their weights. A client's queue
delays only its own next request. A client that returns after a pause starts at the virtual time: it gets its share from
then on. It neither keeps credit for the pause nor pays for capacity that it used while no other client wanted it.

A request is charged its largest possible size on arrival, and refunded the unused part when it ends.
"""

from __future__ import annotations

import math

RATE = 1000.0
"""Tokens per second of a client's clock with weight 1. It converts tokens to the seconds of priorities; shares do not
depend on it."""
KEPT_CLIENTS = 4096
LEAST_WEIGHT = 1e-6


class FairShare:
    """The clocks of all clients, in seconds. Requests without a client name do not take part."""

    def __init__(self) -> None:
        self._virtual_s = -math.inf
        self._ends_s: dict[str, float] = {}
        """End of each client's last request on its clock."""

    def start(self, client: str, weight: float, num_tokens: int, arrived_s: float) -> float:
        """The start of a request of ``num_tokens`` on its client's clock."""
        if not client:
            return arrived_s
        if self._virtual_s == -math.inf:
            self._virtual_s = arrived_s
        start_s = max(self._virtual_s, self._ends_s.get(client, -math.inf))
        self._ends_s[client] = start_s + _seconds(num_tokens, weight)
        if len(self._ends_s) > KEPT_CLIENTS:
            self._forget()
        return start_s

    def serve(self, client: str, start_s: float) -> None:
        """Advance the virtual time: a request with this start has got a slot."""
        if client and start_s > self._virtual_s:
            self._virtual_s = start_s

    def give_back(self, client: str, weight: float, num_tokens: int) -> None:
        """Refund the unused tokens of a request that has ended."""
        if client in self._ends_s:
            self._ends_s[client] -= _seconds(num_tokens, weight)

    def not_after(self, now_s: float) -> float:
        """``now_s``, or the virtual time if that is earlier, for requests that take no part."""
        return now_s if self._virtual_s == -math.inf else min(now_s, self._virtual_s)

    def _forget(self) -> None:
        """Drop clients whose next request would start at the virtual time anyway."""
        self._ends_s = {client: end_s for client, end_s in self._ends_s.items() if end_s > self._virtual_s}


def _seconds(num_tokens: int, weight: float) -> float:
    return num_tokens / (RATE * max(weight, LEAST_WEIGHT))
