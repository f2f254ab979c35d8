"""Fair shares of clients, by weight: start-time fair queueing (Goyal, Vin and Cheng, 1996) over the existing order.

The clock of a client that is served alone runs by ``tokens / (RATE * weight)`` seconds per request. A request *starts*
on it when the one before ends, but not before the *virtual time*, which is the latest start of all requests that got a
slot so far. That start stands where the time of arrival stands otherwise (:mod:`pagebus.actors.scheduler.order`): it is
known when the request arrives, so the order stays static.

It follows: while several clients have requests waiting, they get tokens in proportion to their weights. The queue of
one moves the start of its own next request only. A client that comes back after a pause starts at the virtual time: it
gets its share from then on, not what it did not use, and what it had alone while nobody else wanted it is not held
against it.

A request is charged what it may become, and given back what it did not when it ends.
"""

from __future__ import annotations

import math

RATE = 1000.0
"""Tokens per second of a client's clock with weight 1: how tokens compare to priorities, which are seconds. Shares do
not depend on it."""
KEPT_CLIENTS = 4096
LEAST_WEIGHT = 1e-6


class FairShare:
    """The clocks of all clients, in seconds. Requests without a client's name do not take part."""

    def __init__(self) -> None:
        self._virtual_s = -math.inf
        self._ends_s: dict[str, float] = {}
        """When the last request of each client ends on its clock."""

    def start(self, client: str, weight: float, num_tokens: int, arrived_s: float) -> float:
        """When a request of ``num_tokens`` starts."""
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
        """The request that starts then has got a slot."""
        if client and start_s > self._virtual_s:
            self._virtual_s = start_s

    def give_back(self, client: str, weight: float, num_tokens: int) -> None:
        """A request has ended, so many tokens short of what it was charged."""
        if client in self._ends_s:
            self._ends_s[client] -= _seconds(num_tokens, weight)

    def not_after(self, now_s: float) -> float:
        """``now_s`` for requests that take no part: not behind all that do, should virtual time be behind."""
        return now_s if self._virtual_s == -math.inf else min(now_s, self._virtual_s)

    def _forget(self) -> None:
        """Clients whose clocks say nothing: their next request would start at the virtual time anyway."""
        self._ends_s = {client: end_s for client, end_s in self._ends_s.items() if end_s > self._virtual_s}


def _seconds(num_tokens: int, weight: float) -> float:
    return num_tokens / (RATE * max(weight, LEAST_WEIGHT))
