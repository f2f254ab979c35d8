"""Roles by load (``--roles auto``): how many replicas compute long prompts for the others, or that all do both.

Roles are worth it if streams wait for prompts often enough to be noticed, if the prefill replicas have the time for all
long prompts, and if the others have slots, blocks and time for all streams. Then the fewest prefill replicas that
suffice are chosen. If no number suffices, all replicas do both: roles buy smooth streams, and must not cost throughput.

The demand is measured once a second. A number is adopted once it has been the best for several looks in a row. The
present number stays as long as it suffices by looser limits, so roles do not flap. A change moves nothing by itself: it
applies to sequences placed from then on, and to streams of a new prefill replica, which are handed over like those that
begin there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.fleet.demand import Demand
from pagebus.actors.scheduler.fleet.fleet import Fleet
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

LOOK_S = 1.0
"""The interval between looks at the demand."""
LOOKS = 3
"""Looks in a row for which another number must be the best before it is adopted."""
STAY_S = 10.0
"""For this long after a change, the only change that may follow is back to no roles."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``busy``: the largest share of their time that prefill replicas may need. ``often``: the least share of decode
    steps that would contain a long prompt if all replicas did both. ``slower``: how much longer than those steps the
    average step of decode replicas may be, as a share. ``full``: the largest share of decode replicas' slots and blocks
    that streams may take."""

    busy: float
    often: float
    slower: float
    full: float


ENTER = Limits(busy=0.7, often=0.005, slower=0.1, full=0.8)
STAY = Limits(busy=0.9, often=0.002, slower=0.25, full=0.95)


class AutoRoles:
    """Gives ``roles`` their number of prefill replicas."""

    def __init__(self, roles: Roles, itl_s: float | None) -> None:
        self.demand = Demand()
        self._roles, self._itl_s = roles, itl_s
        self._fleet = Fleet()
        self._wanted, self._num_looks = 0, 0
        self._looks_s = self._changed_s = float("-inf")

    def assign(self, fleet: Fleet) -> None:
        """The set of replicas that get plans has changed."""
        self._fleet = fleet

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has got a slot."""
        num_tokens = len(sequence.tokens) - sequence.num_cached
        if not sequence.produced and self._roles.is_long(num_tokens):
            self.demand.admitted(num_tokens)

    def look(self, now_s: float) -> bool:
        """Adopt another number of prefill replicas, if it is time. Returns whether it did."""
        if now_s < self._looks_s + LOOK_S:
            return False
        self._looks_s = now_s
        live = [replica for replica in self._fleet.replicas if not replica.suspended]
        if not self.demand.look(live, now_s):
            return False
        current = self._roles.num_prefill
        wanted = best(self.demand, live, current, self._itl_s)
        self._num_looks = self._num_looks + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted == current or self._num_looks < LOOKS:
            return False
        if wanted and now_s < self._changed_s + STAY_S:
            return False
        self._changed_s = now_s
        self._roles.set_prefills(wanted, self._fleet)
        return True


def best(demand: Demand, replicas: list[Replica], current: int, itl_s: float | None) -> int:
    """How many of the replicas should be prefill replicas, where ``current`` are; 0: all do both."""
    count = len(replicas)
    enough = (each for each in range(1, count) if _suffices(demand, replicas, each, ENTER, itl_s))
    wanted = next(enough, 0)
    stays = 0 < current < count and _suffices(demand, replicas, current, STAY, itl_s)
    return min(current, wanted or current) if stays else wanted


def _suffices(demand: Demand, replicas: list[Replica], num_prefill: int, limits: Limits, itl_s: float | None) -> bool:
    """Whether this many prefill replicas are worth it, by these limits."""
    count, num_decode = len(replicas), len(replicas) - num_prefill
    rate = sum(replica.prompt_rate.tokens_per_s for replica in replicas) / count
    mixed_s, split_s = demand.step_s(count), demand.step_s(num_decode)
    if not rate or not mixed_s:
        return False
    work = demand.most_tokens() / rate  # replicas that do nothing else
    if demand.least_prompts() / count * mixed_s < limits.often:
        return False
    spare = max(0.0, 1 - split_s / itl_s) if itl_s is not None else 0.0  # with a target the others help
    if work > limits.busy * (num_prefill + num_decode * spare):
        return False
    if split_s > (1 + limits.slower) * mixed_s / max(1 - work / count, 1 - limits.busy):
        return False
    slots = sum(replica.slots.num_slots for replica in replicas) / count
    tokens = sum(replica.pool.num_blocks // replica.num_pages * replica.block_size for replica in replicas) / count
    return max(demand.streams / slots, demand.context / tokens) <= limits.full * num_decode
