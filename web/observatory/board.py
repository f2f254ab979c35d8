"""Encodes the scheduler's states as events for the page: tables in full, block maps as changes.

A map has one value per block: the id of the first sequence that holds it, or one of the values below; and the number of
holders (at most 255). Arrays travel as base64 of little-endian int32 (uint8 for the counts).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages import (
    REQUEST_COLUMNS,
    REQUEST_MARKS,
    SEQUENCE_COLUMNS,
    STEP_COLUMNS,
    STEP_MARKS,
    Int32Array,
    ReplicaState,
    SchedulerState,
)

FREE, CACHED, PINNED, ADAPTER = 0, -1, -2, -3
Counts = NDArray[np.uint8]

_FIELDS = ReplicaState.__struct_fields__
_BLOCKS, _HOSTS = SEQUENCE_COLUMNS.index("num_blocks"), SEQUENCE_COLUMNS.index("num_host_blocks")
_ID, _REPLICA = SEQUENCE_COLUMNS.index("id"), SEQUENCE_COLUMNS.index("replica")
_REQUEST = SEQUENCE_COLUMNS.index("request")
SAME_S = 2e-3
"""Times arrive as ages of low precision: smaller differences count as none."""


@dataclass(slots=True, eq=False)
class TierMap:
    """One tier of one replica: the holder of each block [n], and the number of holders."""

    owners: Int32Array
    shares: Counts

    @classmethod
    def draw(
        cls, size: int, ids: Int32Array, blocks: Int32Array, cached: Int32Array, pinned: Int32Array,
        of_adapters: Int32Array,
    ) -> TierMap:  # fmt: skip
        """``ids[i]`` is the sequence that holds ``blocks[i]``; of several, the first in order is shown."""
        owners = np.zeros(size, np.int32)
        owners[cached] = CACHED
        owners[pinned] = PINNED
        owners[of_adapters] = ADAPTER
        owners[blocks[::-1]] = ids[::-1]
        shares = np.bincount(blocks, minlength=size)[:size] if len(blocks) else np.zeros(size, np.int64)
        return cls(owners, np.minimum(shares, 255).astype(np.uint8))

    def whole(self) -> dict[str, Any]:
        return {"size": len(self.owners), "owners": encode(self.owners), "shares": encode(self.shares)}

    def since(self, before: TierMap | None) -> dict[str, Any]:
        """The changes since an earlier map; the whole map if there is none, or one of another size."""
        if before is None or len(before.owners) != len(self.owners):
            return self.whole()
        changed = np.flatnonzero((before.owners != self.owners) | (before.shares != self.shares)).astype(np.int32)
        if not len(changed):
            return {"size": len(self.owners)}
        if 2 * len(changed) > len(self.owners):
            return self.whole()
        told = {"changed": encode(changed), "owners": encode(self.owners[changed])}
        return {"size": len(self.owners), **told, "shares": encode(self.shares[changed])}


class Board:
    """The last state that was sent, and its maps."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int], tuple[TierMap, TierMap]] = {}
        self._state: SchedulerState | None = None
        self._marks: dict[str, list[float | None]] = {}
        self._shown: dict[str, Any] = {}

    def update(self, state: SchedulerState) -> dict[str, Any]:
        """The event that leads from the previous state to this one; its ``changed`` says whether anything but the time
        is new."""
        maps = draw_maps(state)
        replicas = []
        for replica, (device, host) in zip(state.replicas, maps, strict=True):
            before = self._maps.get((replica.name, replica.epoch))
            replicas.append(
                {
                    **_replica(replica),
                    "device": device.since(before and before[0]),
                    "host": host.since(before and before[1]),
                }
            )
        self._maps = {(each.name, each.epoch): pair for each, pair in zip(state.replicas, maps, strict=True)}
        self._state = state
        event = {**self._tables(state), "replicas": replicas, "steps": _steps(state), "flashed": state.flashed.tolist()}
        shown = {name: value for name, value in event.items() if name not in ("at_s", "took_s")}
        is_new, self._shown = shown != self._shown, shown
        return {**event, "changed": is_new}

    def whole(self) -> dict[str, Any] | None:
        """The event for a new page; None before the first state."""
        state = self._state
        if state is None:
            return None
        replicas = []
        for replica in state.replicas:
            device, host = self._maps[replica.name, replica.epoch]
            replicas.append({**_replica(replica), "device": device.whole(), "host": host.whole()})
        return {**self._tables(state), "replicas": replicas, "steps": [], "flashed": []}

    def blocks_of(self, request_id: str) -> list[dict[str, Any]]:
        """The block tables of a request's sequences in the last state; empty if the request is unknown."""
        state = self._state
        if state is None or request_id not in state.request_ids:
            return []
        request, found, at, host_at = state.request_ids.index(request_id), [], 0, 0
        for row in state.sequences.reshape(-1, len(SEQUENCE_COLUMNS)).tolist():
            end, host_end = at + row[_BLOCKS], host_at + row[_HOSTS]
            if row[_REQUEST] == request:
                replica = state.replicas[row[_REPLICA]].name if row[_REPLICA] >= 0 else None
                blocks, hosts = state.blocks[at:end].tolist(), state.host_blocks[host_at:host_end].tolist()
                found.append({"id": row[_ID], "replica": replica, "blocks": blocks, "host_blocks": hosts})
            at, host_at = end, host_end
        return found

    def _tables(self, state: SchedulerState) -> dict[str, Any]:
        tables = _tables(state)
        self._marks = {row[0]: _steady(row, self._marks.get(row[0])) for row in tables["requests"]}
        return tables


def draw_maps(state: SchedulerState) -> list[tuple[TierMap, TierMap]]:
    """Both tiers of each replica."""
    rows = state.sequences.reshape(-1, len(SEQUENCE_COLUMNS))
    ids, replicas = rows[:, _ID], rows[:, _REPLICA]
    device = np.repeat(ids, rows[:, _BLOCKS]), np.repeat(replicas, rows[:, _BLOCKS])
    host_ids, host_at = np.repeat(ids, rows[:, _HOSTS]), np.repeat(replicas, rows[:, _HOSTS])
    maps, cached, cached_hosts, pinned, adapted = [], 0, 0, 0, 0
    for number, replica in enumerate(state.replicas):
        mine = device[1] == number
        here = host_at == number
        ends = cached + replica.num_cached, cached_hosts + replica.num_cached_hosts, pinned + replica.num_pinned
        of_adapters = state.adapter_blocks[adapted : adapted + replica.num_adapter_blocks]
        empty = state.pinned_blocks[:0]
        maps.append(
            (
                TierMap.draw(replica.num_blocks, device[0][mine], state.blocks[mine],
                             state.cached_blocks[cached : ends[0]], state.pinned_blocks[pinned : ends[2]],
                             of_adapters),
                TierMap.draw(replica.num_host_blocks, host_ids[here], state.host_blocks[here],
                             state.cached_hosts[cached_hosts : ends[1]], empty, empty),
            )
        )  # fmt: skip
        cached, cached_hosts, pinned = ends
        adapted += len(of_adapters)
    return maps


def encode(array: NDArray[Any]) -> str:
    """Base64 of the raw values."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _replica(replica: ReplicaState) -> dict[str, Any]:
    return {name: getattr(replica, name) for name in _FIELDS}


def _tables(state: SchedulerState) -> dict[str, Any]:
    marks = _times(state.request_marks, len(REQUEST_MARKS), state.at_s)
    requests = state.requests.reshape(-1, len(REQUEST_COLUMNS)).tolist()
    return {
        "at_s": state.at_s,
        "took_s": state.took_s,
        "epoch": state.epoch,
        "num_waiting": state.num_waiting,
        "num_over": state.num_over,
        "requests": [
            [request_id, *row, *times]
            for request_id, row, times in zip(state.request_ids, requests, marks, strict=True)
        ],
        "clients": list(state.clients),
        "sequences": state.sequences.reshape(-1, len(SEQUENCE_COLUMNS)).tolist(),
    }


def _steps(state: SchedulerState) -> list[list[float | None]]:
    rows = state.steps.reshape(-1, len(STEP_COLUMNS)).tolist()
    ages = state.step_marks.view("<f4").reshape(-1, len(STEP_MARKS)).astype(np.float64)
    ages[:, :-1] = state.at_s - ages[:, :-1]
    return [[*row, *marks] for row, marks in zip(rows, np.round(ages, 6).tolist(), strict=True)]


def _steady(row: list[Any], before: list[float | None] | None) -> list[float | None]:
    """Replace the marks of a request, at the end of its row, by those that were told before if they are the same."""
    marks = row[-len(REQUEST_MARKS) :]
    if before is not None:
        for place, (old, new) in enumerate(zip(before, marks, strict=True)):
            if old is not None and new is not None and abs(old - new) < SAME_S:
                marks[place] = old
        row[-len(REQUEST_MARKS) :] = marks
    return marks


def _times(bits: Int32Array, width: int, at_s: float) -> Sequence[Sequence[float | None]]:
    """Times of the wall clock from ages; None for what has not happened."""
    times = np.round(at_s - bits.view("<f4").reshape(-1, width).astype(np.float64), 6)
    return [[None if time != time else time for time in row] for row in times.tolist()]


COLUMNS = {
    "requests": ["id", *REQUEST_COLUMNS, *(f"{name}_s" for name in REQUEST_MARKS)],
    "sequences": list(SEQUENCE_COLUMNS),
    "steps": [*STEP_COLUMNS, *(f"{name}_s" for name in STEP_MARKS)],
}
"""Names of the columns of the tables, told once at the beginning."""
