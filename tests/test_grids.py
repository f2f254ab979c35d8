"""Which cases of a grid run: the same each time, some of each group, and all where all are asked for."""

from __future__ import annotations

import pytest

from tests import grids

CASES = [(group, str(number)) for group in ("a", "b", "c") for number in range(20)]


def chosen(one_in: int, cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return grids.chosen(cases, one_in, lambda case: case)


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "FULL", False)


@pytest.mark.usefixtures("some")
def test_some_of_each_group_run() -> None:
    """One, however small the share, and in the order in which they are given."""
    few, more = chosen(1000, CASES), chosen(4, CASES)
    assert [group for group, _ in few] == ["a", "b", "c"]
    assert set(few) <= set(more)
    assert 9 <= len(more) <= 24
    assert more == sorted(more, key=CASES.index)


@pytest.mark.usefixtures("some")
def test_the_first_runs_where_order_says_something() -> None:
    found = grids.chosen(CASES, 1000, lambda case: case, first=True)
    assert found == [("a", "0"), ("b", "0"), ("c", "0")]


@pytest.mark.usefixtures("some")
def test_other_cases_change_nothing() -> None:
    """A case that is new may run; of the old ones the same do, in whatever order they come."""
    assert chosen(4, CASES[::-1]) == chosen(4, CASES)[::-1]
    new = [("b", "new"), *CASES]
    assert len(set(chosen(4, CASES)) - set(chosen(4, new))) <= 1


def test_all_run_where_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "FULL", True)
    assert chosen(1000, CASES) == CASES
