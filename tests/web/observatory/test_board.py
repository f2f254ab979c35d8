"""From the scheduler's state to what a page is sent: maps and their changes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagebus.bus.messages import REQUEST_COLUMNS, REQUEST_MARKS, SEQUENCE_COLUMNS, ReplicaState, SchedulerState
from pagebus.web.observatory.board import ADAPTER, CACHED, FREE, PINNED, Board, TierMap

SIZE = 12


def replica(**counts: int) -> ReplicaState:
    names = [name for name in ReplicaState.__slots__ if name not in ("name", "suspended", "adapters", "role", *counts)]
    return ReplicaState(name="gpu-0", **dict.fromkeys(names, 0), **counts)


def state(
    tables: dict[int, list[int]], cached: list[int] = (), pinned: list[int] = (), at_s: float = 100.0,
    adapted: list[int] = (),
) -> SchedulerState:  # fmt: skip
    """One replica of 12 blocks; each sequence is that of a request of its own, which has arrived at 90 s."""
    rows = []
    for place, (sequence_id, table) in enumerate(tables.items()):
        row = dict.fromkeys(SEQUENCE_COLUMNS, 0) | {"id": sequence_id, "request": place, "num_blocks": len(table)}
        rows.append(list(row.values()))
    marks = [at_s - 90.0] + [float("nan")] * (len(REQUEST_MARKS) - 1)
    return SchedulerState(
        serial=1, epoch=1, at_s=at_s, took_s=0.001, num_waiting=0, num_over=0, over_seen=0, steps_seen=0,
        request_ids=tuple(f"request-{each}" for each in tables),
        requests=np.zeros(len(tables) * len(REQUEST_COLUMNS), np.int32),
        request_marks=np.array(marks * len(tables), "<f4").view(np.int32),
        replicas=(
            replica(
                num_blocks=SIZE, num_cached=len(cached), num_pinned=len(pinned), num_adapter_blocks=len(adapted)
            ),
        ),
        sequences=np.array(rows, np.int32).reshape(-1),
        blocks=np.array([block for table in tables.values() for block in table], np.int32),
        cached_blocks=np.array(cached, np.int32),
        pinned_blocks=np.array(pinned, np.int32),
        adapter_blocks=np.array(adapted, np.int32),
    )  # fmt: skip


def ints(text: str, kind: str = "<i4") -> list[int]:
    return np.frombuffer(base64.b64decode(text), kind).tolist()


class Page:
    """Follows the events as the page does."""

    def __init__(self) -> None:
        self.owners: list[int] = []
        self.shares: list[int] = []

    def take(self, event: dict[str, Any]) -> None:
        (told,) = event["replicas"]
        tier = told["device"]
        if "changed" in tier:
            changed = ints(tier["changed"])
            for block, owner, share in zip(changed, ints(tier["owners"]), ints(tier["shares"], "u1"), strict=True):
                self.owners[block], self.shares[block] = owner, share
        elif "owners" in tier:
            self.owners, self.shares = ints(tier["owners"]), ints(tier["shares"], "u1")


def test_a_map_tells_holders_and_what_is_free() -> None:
    """The first holder in order is shown, with how many there are."""
    page = Page()
    page.take(Board().update(state({7: [0, 1], 9: [1, 2]}, cached=[4, 5], pinned=[6], adapted=[8, 11])))
    assert page.owners == [7, 7, 9, FREE, CACHED, CACHED, PINNED, FREE, ADAPTER, FREE, FREE, ADAPTER]
    assert page.shares == [1, 2, 1, *[0] * 9]


def test_nothing_is_told_when_nothing_has_changed() -> None:
    board = Board()
    board.update(state({7: [0, 1]}))
    assert board.update(state({7: [0, 1]}))["replicas"][0]["device"] == {"size": SIZE}


def test_the_time_alone_is_no_change() -> None:
    """Marks are told as ages, and rounded anew each time; what is shown stays what it was."""
    board = Board()
    for at_s in (100.0, 100.1):
        board.update(state({7: [0, 1]}, at_s=at_s))
    first = board.update(state({7: [0, 1]}, at_s=100.2))
    again = board.update(state({7: [0, 1]}, at_s=1334.567))
    assert (first["changed"], again["changed"]) == (False, False)
    assert again["requests"] == first["requests"]
    assert board.update(state({7: [0, 1, 2]}, at_s=1335.0))["changed"]


blocks = st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE)


@given(st.lists(st.tuples(st.dictionaries(st.integers(1, 4), blocks, max_size=4), blocks), min_size=1, max_size=6))
def test_changes_lead_to_the_same_map_as_the_whole(history: list[tuple[dict[int, list[int]], list[int]]]) -> None:
    """A page that has followed from the beginning sees what one that comes last sees."""
    board, page, late = Board(), Page(), Page()
    for tables, cached in history:
        held = {block for table in tables.values() for block in table}
        page.take(board.update(state(tables, cached=[block for block in cached if block not in held])))
    late.take(board.whole() or {})
    assert (page.owners, page.shares) == (late.owners, late.shares)


def test_more_than_255_holders_are_shown_as_255() -> None:
    drawn = TierMap.draw(1, np.arange(1, 301, dtype=np.int32), np.zeros(300, np.int32), *[np.empty(0, np.int32)] * 3)
    assert drawn.shares.tolist() == [255]
    assert drawn.owners.tolist() == [1]
