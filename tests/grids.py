"""Which cases of large grids run each time: a share of them, always the same. ``make grids`` runs all.

Cases of one test with ``@pytest.mark.share(n)`` and launches of one kernel are a group. Of each group one runs, and of
the others one in ``n``: which, their names say, so that neither their number nor their order changes it. Of a property
a third of the examples are tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from zlib import crc32

import pytest

FULL = os.environ.get("PAGEBUS_TEST_GRIDS") == "full"
Case = TypeVar("Case")


def chosen(
    cases: Iterable[Case], one_in: int, names: Callable[[Case], tuple[str, str]], *, first: bool = False
) -> list[Case]:
    """The cases that run, in their order; ``names``: of a case's group, and of the case. ``first``: the first of each
    group runs, and not one of any name."""
    every = list(cases)
    if FULL:
        return every
    always: dict[str, tuple[int, int]] = {}
    numbers = []
    for place, case in enumerate(every):
        group, name = names(case)
        numbers.append(crc32(f"{group} {name}".encode()))
        mine = (0 if first else numbers[-1], place)
        always[group] = min(mine, always.get(group, mine))
    places = {place for _, place in always.values()}
    return [case for place, case in enumerate(every) if place in places or numbers[place] % one_in == 0]


def examples(count: int) -> int:
    """How many examples of a property are tried, of so many by ``make grids``."""
    return count if FULL else -(-count // 3)


def needs_full(value: object) -> Any:
    """A parameter of a test that runs only with all others."""
    return pytest.param(value, marks=pytest.mark.skipif(not FULL, reason="part of `make grids` only"))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of marked tests that do not run."""
    marked = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("share"))}
    kept: set[pytest.Item] = set()
    for one_in in set(marked.values()):
        own = [item for item, its in marked.items() if its == one_in]
        kept.update(chosen(own, one_in, lambda item: (item.nodeid.partition("[")[0], item.nodeid)))
    config.hook.pytest_deselected(items=[item for item in marked if item not in kept])
    items[:] = [item for item in items if item not in marked or item in kept]
