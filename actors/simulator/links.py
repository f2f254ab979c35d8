"""Links between modelled executors: how long it takes to pull blocks from one into another.

Every executor sends, and receives, at the rate of its link at most. Transfers that are under way at the same time share
it equally, at both ends. Those of one pair run one after another. Blocks of host tiers come over links of their own, as
they do not come from a device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

NEVER_S = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Of each executor's link, in either direction. ``host_bytes_per_s``: out of host tiers. ``latency_s`` comes before
    the bytes of a pull, ``open_s`` before those of a pair's first one. Both count as time of the copy, as real
    executors measure it."""

    bytes_per_s: float
    host_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    open_s: float = 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    """``num_bytes`` from the executor at the address ``lender`` to the one at ``target``. ``number`` is the pull's.
    ``hosts``: they come out of the lender's host tier, which may be the target's own. ``ends_s``: when it ends, if it
    keeps its present rate."""

    number: int
    lender: str
    target: str
    num_bytes: float
    hosts: bool = False
    began_s: float = 0.0
    left: float = 0.0
    rate: float = 0.0
    ends_s: float = NEVER_S

    @property
    def pair(self) -> Pair:
        """Between whom it is."""
        return self.lender, self.target, self.hosts


Pair = tuple[str, str, bool]
At = Callable[[float, Callable[[float], None]], None]
Done = Callable[[float, Transfer, bool], None]


class Links:
    """Between all executors that have joined, by address. ``at`` calls something at a time; ``done(at_s, transfer,
    there)`` is called when a transfer ends. Methods that take ``at_s`` are called at this time."""

    def __init__(self, speed: LinkSpeed, at: At, done: Done) -> None:
        self._speed, self._at, self._done = speed, at, done
        self._live: set[str] = set()
        self._pairs: dict[Pair, deque[Transfer]] = {}
        """Those ordered, of which the first is on its way."""
        self._flowing: list[Transfer] = []
        self._flowed_s = 0.0
        self._wake_s = NEVER_S

    def join(self, address: str) -> None:
        """Blocks may be pulled from this address, and to it."""
        self._live.add(address)

    def pull(self, transfer: Transfer, at_s: float) -> None:
        """Begin a transfer, behind those of the same pair."""
        if transfer.target not in self._live:
            return
        if transfer.lender not in self._live:
            self._done(at_s, transfer, False)
            return
        is_first = transfer.pair not in self._pairs
        queue = self._pairs.setdefault(transfer.pair, deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._begin(at_s, transfer, self._speed.open_s if is_first else 0.0)

    def lose(self, at_s: float, address: str) -> None:
        """An executor is gone: what others pull from it fails, and what it pulls is of no interest any more."""
        self._live.discard(address)
        self._flow(at_s)
        for pair in [each for each in self._pairs if address in each]:
            queue = self._pairs.pop(pair)
            self._flowing = [each for each in self._flowing if each not in queue]
            for transfer in queue if pair[1] != address else ():
                self._done(at_s, transfer, False)
        self._share(at_s)

    def _begin(self, at_s: float, transfer: Transfer, open_s: float = 0.0) -> None:
        transfer.began_s = at_s
        self._at(at_s + open_s + self._speed.latency_s, partial(self._start, transfer))

    def _start(self, transfer: Transfer, at_s: float) -> None:
        """Its bytes begin to come."""
        queue = self._pairs.get(transfer.pair)
        if not queue or queue[0] is not transfer:  # an end of it is gone
            return
        self._flow(at_s)
        transfer.left = transfer.num_bytes
        self._flowing.append(transfer)
        self._share(at_s)

    def _flow(self, at_s: float) -> None:
        """Bytes have come since the last call."""
        for each in self._flowing:
            each.left -= each.rate * (at_s - self._flowed_s)
        self._flowed_s = at_s

    def _share(self, at_s: float) -> None:
        """Divide the rates anew, and wake up when the first transfer ends."""
        out, into = (
            Counter((getattr(each, end), each.hosts) for each in self._flowing) for end in ("lender", "target")
        )
        for each in self._flowing:
            whole = self._speed.host_bytes_per_s if each.hosts else self._speed.bytes_per_s
            each.rate = whole / max(out[each.lender, each.hosts], into[each.target, each.hosts])
            each.ends_s = at_s + max(each.left, 0.0) / each.rate
        self._wake_s = min((each.ends_s for each in self._flowing), default=NEVER_S)
        if self._flowing:
            self._at(self._wake_s, self._wake)

    def _wake(self, at_s: float) -> None:
        if at_s != self._wake_s:  # the rates have changed since
            return
        self._flow(at_s)
        ended = [each for each in self._flowing if each.ends_s <= at_s]
        self._flowing = [each for each in self._flowing if each.ends_s > at_s]
        for transfer in ended:
            queue = self._pairs[transfer.pair]
            queue.popleft()
            self._done(at_s, transfer, True)
            if queue:
                self._begin(at_s, queue[0])
        self._share(at_s)
