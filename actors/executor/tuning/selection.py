"""Which changes make a step faster: one product after the other, each against what has been kept before.

Knows nothing of GPUs: a :class:`Comparer` times steps. A change is kept if the step takes less by more than a share of
it, and by more than the measurement may be off. At the end all that was kept is held against today's choices once more,
and nothing is kept unless the step is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pagebus.actors.executor.tuning.changes import Change, Choices

GAIN = 0.003
"""Of the step's time, that a change has to save."""
ERRORS = 3.0
"""Standard errors of what it saves, that it has to save as well."""
CONFIRMED = 2
"""The most promising changes of a product, which are timed for longer."""


class Comparison(NamedTuple):
    """Milliseconds of steps with choices before and after, alternating, and the standard error of what is saved."""

    before: float
    after: float
    error: float

    @property
    def saved(self) -> float:
        """Milliseconds."""
        return self.before - self.after

    @property
    def faster(self) -> bool:
        """By more than noise."""
        return self.saved >= GAIN * self.before and self.saved > ERRORS * self.error


class Comparer(Protocol):
    """Times steps with choices in place of today's."""

    def key(self, choices: Choices) -> object:
        """What the step runs with them: equal if it runs the same."""

    def compare(self, before: Choices, after: Choices, *, thoroughly: bool) -> Comparison | None:
        """None: the GPU does not take what is chosen ``after``."""


class Kept(NamedTuple):
    """The ``choices`` that make a step faster, by the last comparison with today's; none: all ``changed`` names, with
    the share of the step that each saved when it was kept."""

    choices: Choices
    before: float
    after: float
    changed: list[tuple[str, float]]
    done: bool
    """Whether all was tried."""


def select(
    groups: Sequence[Sequence[Change]], comparer: Comparer, has_time: Callable[[], bool],
    prepare: Callable[[], object] = lambda: None,
) -> Kept:  # fmt: skip
    """Keep the best of each group, as long as there is time; ``prepare`` is called before each."""
    kept: Choices = {}
    changed: list[tuple[str, float]] = []
    done = True
    for group in groups:
        if not has_time():
            done = False
            break
        prepare()
        promising, complete = _screened(group, kept, comparer, has_time)
        done &= complete
        best = _confirmed(promising, kept, comparer)
        if best is not None:
            kept, comparison = {**kept, **best.choices}, best.comparison
            changed.append((best.name, comparison.saved / comparison.before))
    return _checked(kept, changed, comparer, done=done)


class _Tried(NamedTuple):
    name: str
    choices: Choices
    comparison: Comparison


def _screened(
    group: Sequence[Change], kept: Choices, comparer: Comparer, has_time: Callable[[], bool]
) -> tuple[list[_Tried], bool]:
    """The changes of a group that may be worth it, the best first, and whether all were tried."""
    seen, found = {comparer.key(kept)}, list[_Tried]()
    for change in group:
        if not has_time():
            return sorted(found, key=_after), False
        key = comparer.key({**kept, **change.choices})
        if key in seen:
            continue
        seen.add(key)
        comparison = comparer.compare(kept, {**kept, **change.choices}, thoroughly=False)
        if comparison is not None and comparison.saved > 0:
            found.append(_Tried(change.name, change.choices, comparison))
    return sorted(found, key=_after), True


def _after(tried: _Tried) -> float:
    return tried.comparison.after / tried.comparison.before


def _confirmed(promising: Sequence[_Tried], kept: Choices, comparer: Comparer) -> _Tried | None:
    """The best of a group when it is timed for longer."""
    found = []
    for tried in promising[:CONFIRMED]:
        comparison = comparer.compare(kept, {**kept, **tried.choices}, thoroughly=True)
        if comparison is not None and comparison.faster:
            found.append(tried._replace(comparison=comparison))
    return min(found, key=_after, default=None)


def _checked(kept: Choices, changed: list[tuple[str, float]], comparer: Comparer, *, done: bool) -> Kept:
    """All that was kept, unless the step is not faster with it after all."""
    comparison = comparer.compare({}, kept, thoroughly=True)
    if comparison is None:
        return Kept({}, 0.0, 0.0, [], done)
    if kept and comparison.faster:
        return Kept(kept, comparison.before, comparison.after, changed, done)
    return Kept({}, comparison.before, comparison.before, [], done)
