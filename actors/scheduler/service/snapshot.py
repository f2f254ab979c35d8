"""Snapshots for observers: the core's state as one message, and the events since the observer's last one.

Nothing is stored or called per step unless a snapshot was requested within :data:`WATCHED_S`. Building one takes time
in proportion to the blocks held. Observers see the time taken, and slow their requests accordingly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Request, Sequence
from pagebus.actors.scheduler.service.snapshot_rows import (
    ages,
    ints,
    joined,
    replica_state,
    request_marks,
    request_row,
    sequence_row,
    step_marks,
)
from pagebus.bus.messages import (
    FLASH_COPIED,
    FLASH_PULLED,
    FLASH_SWAPPED_IN,
    FLASH_SWAPPED_OUT,
    BlockRequested,
    BlockState,
    Int32Array,
    SchedulerState,
    StateRequested,
    StepPlan,
    StepResult,
)

WATCHED_S = 5.0
"""Time after a request during which events are collected, in seconds."""
SHOWN_WAITING = 256
"""Most waiting sequences, and undelivered requests, that are listed one by one."""
KEPT_OVER = 512
KEPT_STEPS = 4096
KEPT_FLASHES = 4096


@dataclass(slots=True)
class _Step:
    """A plan on its way. ``decodes`` and ``prefill`` are tokens, drafts those of decodes; ``flashes`` (kind, block)."""

    decodes: int
    prefill: int
    planned_s: float
    copied: int
    swapped_out: int
    swapped_in: int
    flashes: list[tuple[int, int]]


class Snapshot:
    """Builds snapshots of one core, and collects events while it is watched. ``now_s`` is the time of the wall
    clock."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._until_s = 0.0
        self._planned: dict[tuple[str, int], _Step] = {}
        self._steps: deque[tuple[str, list[int], tuple[float, ...], list[tuple[int, int]]]] = deque(maxlen=KEPT_STEPS)
        self._pulled: deque[tuple[int, str, list[int]]] = deque(maxlen=KEPT_STEPS)
        self._over: deque[tuple[int, float, Request]] = deque(maxlen=KEPT_OVER)
        self._num_steps = self._num_over = 0

    # -- events -------------------------------------------------------------------------------------------------------
    def is_watched(self, now_s: float) -> bool:
        """Whether events must be collected; drops all of them once there is no observer."""
        if now_s < self._until_s:
            return True
        if self._until_s:
            self._until_s = 0.0
            for kept in (self._planned, self._steps, self._pulled, self._over):
                kept.clear()
        return False

    def planned(self, replica: str, plan: StepPlan) -> None:
        """Note a plan."""
        flashes = [(FLASH_COPIED, block) for block in plan.copy_targets.tolist()]
        flashes += [(FLASH_SWAPPED_OUT, block) for block in plan.swap_out_blocks.tolist()]
        flashes += [(FLASH_SWAPPED_IN, block) for block in plan.swap_in_blocks.tolist()]
        self._planned[replica, plan.step] = _Step(
            int(plan.num_scheduled[: plan.num_decode_rows].sum()),
            int(plan.num_scheduled[plan.num_decode_rows :].sum()),
            plan.planned_s,
            len(plan.copy_targets),
            len(plan.swap_out_blocks),
            len(plan.swap_in_blocks),
            flashes[:KEPT_FLASHES],
        )
        if len(self._planned) > KEPT_STEPS:  # of replicas that are gone
            del self._planned[next(iter(self._planned))]

    def result_arrived(self, name: str, result: StepResult, now_s: float) -> None:
        """Note a result that the core has not handled yet."""
        step = self._planned.pop((name, result.step), None)
        replica = self.core.replicas.get(name)
        if step is None or replica is None or not replica.in_flight or replica.in_flight[0].step != result.step:
            return
        self._num_steps += 1
        wasted = num_unwanted(replica)
        row = [self._num_steps, 0, result.step, step.decodes, step.prefill, wasted, step.copied, step.swapped_out,
               step.swapped_in]  # fmt: skip
        marks = (step.planned_s, result.received_s, result.launched_s, result.done_s, now_s)
        self._steps.append((name, row, (*marks, result.busy_s), step.flashes))

    def pulled(self, replica: str, blocks: list[int]) -> None:
        """Note the end of a pull. It gets a number of its own: the next step may be long in coming."""
        self._num_steps += 1
        self._pulled.append((self._num_steps, replica, blocks[:KEPT_FLASHES]))

    def over(self, request: Request, now_s: float) -> None:
        """Note a request that is delivered or abandoned."""
        self._num_over += 1
        self._over.append((self._num_over, now_s, request))

    # -- snapshots ----------------------------------------------------------------------------------------------------
    def build(self, asked: StateRequested, now_s: float) -> SchedulerState:
        """The whole state, and the events since the observer's last request."""
        began_s = time.thread_time()
        self._until_s = now_s + WATCHED_S
        is_same = asked.epoch == self.core.config.epoch  # otherwise it has seen what another scheduler counted
        over = [each for each in self._over if each[0] > (asked.over_seen if is_same else 0)]
        return SchedulerState(
            serial=asked.serial,
            epoch=self.core.config.epoch,
            at_s=now_s,
            num_waiting=len(self.core.waiting),
            num_over=len(over),
            over_seen=self._num_over,
            steps_seen=self._num_steps,
            **self._replicas(),
            **self._requests([(request, over_s) for _, over_s, request in over], now_s),
            **self._events(asked.steps_seen if is_same else 0, now_s),
            took_s=time.thread_time() - began_s,
        )

    def _replicas(self) -> dict[str, Any]:
        """The replicas, and their blocks that no sequence holds."""
        replicas = list(self.core.replicas.values())
        pinned = [self._pinned(replica) for replica in replicas]
        cached = [_free_listed(replica, held) for replica, held in zip(replicas, pinned, strict=True)]
        cached_hosts = [self._cached_hosts(replica) for replica in replicas]
        role = self.core.planner.roles.role
        return {
            "replicas": tuple(
                replica_state(replica, role(replica), len(free), len(hosts), len(held))
                for replica, free, hosts, held in zip(replicas, cached, cached_hosts, pinned, strict=True)
            ),
            "cached_blocks": joined(cached),
            "cached_hosts": joined(cached_hosts),
            "pinned_blocks": ints(chain.from_iterable(pinned)),
            "adapter_blocks": ints(chain.from_iterable(map(_of_adapters, replicas))),
        }

    def _requests(self, over: list[tuple[Request, float]], now_s: float) -> dict[str, Any]:
        """The requests, first those that are ``over``, and the sequences with their blocks."""
        replicas = self.core.replicas
        sequences, living = self._shown()
        requests = [request for request, _ in over] + living
        marks = [request_marks(request, over_s) for request, over_s in over]
        marks += [request_marks(request, 0.0) for request in living]
        places, numbers = {id(request): place for place, request in enumerate(requests)}, self._numbers()
        host_tables = [_hosts_of(replicas, sequence) for sequence in sequences]
        rows = (
            sequence_row(replicas, sequence, places[id(sequence.request)], numbers, len(held))
            for sequence, held in zip(sequences, host_tables, strict=True)
        )
        return {
            "request_ids": tuple(request.id for request in requests),
            "clients": tuple(request.client for request in requests) if any(each.client for each in requests) else (),
            "requests": ints(chain.from_iterable(request_row(replicas, request) for request in requests)),
            "request_marks": ages(marks, now_s),
            "sequences": ints(chain.from_iterable(rows)),
            "blocks": ints(chain.from_iterable(sequence.pages for sequence in sequences)),
            "host_blocks": ints(chain.from_iterable(host_tables)),
        }

    def _events(self, seen: int, now_s: float) -> dict[str, Any]:
        """The steps after number ``seen``, and what was copied in them or pulled since."""
        numbers = self._numbers()
        steps = self._steps_after(seen, numbers)
        flashed = [(row[1], *flash) for row, _, flashes in steps for flash in flashes]
        return {
            "steps": ints(chain.from_iterable(row for row, _, _ in steps)),
            "step_marks": step_marks([marks for _, marks, _ in steps], now_s),
            "flashed": ints(chain.from_iterable(flashed + self._pulled_after(seen, numbers))),
        }

    def _numbers(self) -> dict[str, int]:
        """The places of the replicas, by name."""
        return {name: number for number, name in enumerate(self.core.replicas)}

    def _shown(self) -> tuple[list[Sequence], list[Request]]:
        """Sequences that hold a slot or wait, and all requests of these or that clients have not confirmed."""
        slots = chain.from_iterable(replica.slots.sequences for replica in self.core.replicas.values())
        sequences = [sequence for sequence in slots if sequence is not None]
        sequences += islice(self.core.waiting, SHOWN_WAITING)
        requests = {id(sequence.request): sequence.request for sequence in sequences}
        requests |= {id(request): request for request in islice(self.core.delivery.finished.values(), SHOWN_WAITING)}
        return sequences, list(requests.values())

    def _cached_hosts(self, replica: Replica) -> Int32Array:
        """Host blocks that are listed. Lent ones are among them: they keep their content while others read them."""
        return ints(dict.fromkeys(chain(replica.host_tier.pool.cached, self.core.planner.pulls.owned_hosts(replica))))

    def _steps_after(
        self, seen: int, numbers: dict[str, int]
    ) -> list[tuple[list[int], tuple[float, ...], list[tuple[int, int]]]]:
        found = []
        for name, row, marks, flashes in reversed(self._steps):
            if row[0] <= seen:
                break
            if name in numbers:
                found.append(([row[0], numbers[name], *row[2:]], marks, flashes))
        found.reverse()
        return found

    def _pulled_after(self, seen: int, numbers: dict[str, int]) -> list[tuple[int, int, int]]:
        after = [(name, blocks) for number, name, blocks in self._pulled if number > seen and name in numbers]
        return [(numbers[name], FLASH_PULLED, block) for name, blocks in after for block in blocks]

    def _pinned(self, replica: Replica) -> list[int]:
        """Blocks that are held because something is copied from or to them, once for each holder."""
        copied = (each.copied[0] for each in replica.slots.sequences if each and each.copied)
        return [*chain.from_iterable(copied), *self.core.planner.pulls.owned(replica)]

    def block(self, asked: BlockRequested) -> BlockState:
        """The content and owners of one block."""
        replica = self.core.replicas.get(asked.replica)
        if replica is None or asked.block < 0:
            return BlockState(serial=asked.serial)
        waiting = self.core.waiting if asked.on_host else ()
        everybody = [each for each in chain(replica.slots.sequences, waiting) if each is not None]
        owners = [
            (each, table, first)
            for each in everybody
            for table, first in _tables(self.core.replicas, each, replica.windowed_pages, on_host=asked.on_host)
            if asked.block in table
        ]
        if not owners and not asked.on_host:
            for name, blocks in replica.adapters.resident:
                if asked.block in blocks:
                    place = blocks.index(asked.block)
                    return BlockState(serial=asked.serial, adapter=name, place=place, table=ints(blocks))
        if not owners:
            index = replica.host_tier.pool.index if asked.on_host else replica.index
            content = index.hash_of(asked.block)
            return BlockState(serial=asked.serial, hashes=() if content is None else (content.hex(),))
        sequence, table, first = owners[0]
        place = table.index(asked.block)
        return BlockState(
            serial=asked.serial,
            owners=tuple(dict.fromkeys(each.request.id for each, _, _ in owners)),
            hashes=tuple(each.hex() for each in sequence.hashes[: first + place + 1]),
            place=place,
            table=ints(table),
            first_block=first,
        )


def num_unwanted(replica: Replica) -> int:
    """Rows of the oldest step in flight that sample a token for a sequence that is over."""
    flight = replica.in_flight[0]
    unknown = flight.sample_ids[replica.slots.ids[flight.sample_slots] != flight.sample_ids]
    return sum(not replica.step_results.expects(sequence_id) for sequence_id in unknown.tolist())


def _hosts_of(replicas: Mapping[str, Replica], sequence: Sequence) -> list[int]:
    """The sequence's host blocks: swapped out, or being loaded."""
    if sequence.swapped is not None:
        return sequence.swapped.hosts
    return [] if sequence.replica is None else replicas[sequence.replica].host_tier.loading(sequence)


def _tables(
    replicas: Mapping[str, Replica], sequence: Sequence, windowed_pages: int, *, on_host: bool
) -> list[tuple[list[int], int]]:
    """The sequence's tables of pages, each with the block that it begins with."""
    if not on_host:
        kinds, pages, first = (sequence.blocks, sequence.first_block), sequence.windowed, sequence.first_windowed
    elif (swapped := sequence.swapped) is not None:
        kinds, pages, first = (swapped.host_blocks, swapped.first_block), swapped.windowed_hosts, swapped.first_windowed
    else:
        return [(_hosts_of(replicas, sequence), 0)]
    return [kinds, *((pages[kind::windowed_pages], first) for kind in range(windowed_pages))]


def _of_adapters(replica: Replica) -> list[int]:
    """The blocks of adapters on the device."""
    return [block for _, blocks in replica.adapters.resident for block in blocks]


def _free_listed(replica: Replica, pinned: list[int]) -> Int32Array:
    """Free blocks that are listed in the prefix index, but those of adapters."""
    listed, held = ints(replica.index.listed), np.zeros(replica.pool.num_blocks, np.bool_)
    held[pinned] = True
    held[_of_adapters(replica)] = True
    for sequence in replica.slots.sequences:
        if sequence is not None:
            held[sequence.pages] = True
    return np.asarray(listed[~held[listed]], np.int32)
