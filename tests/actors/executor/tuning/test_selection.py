"""Which changes are kept, by a timer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.executor.tuning.changes import Change, Choices
from pagebus.actors.executor.tuning.selection import GAIN, Comparison, select
from pagebus.kernels.linear.shapes import Product

PRODUCTS = [Product("plain", 64 * (1 + index), 64) for index in range(3)]
STEP_MS = 10.0


class FakeSteps:
    """Steps whose time is ``ms`` of what is chosen, and each measurement off by the next of ``noise``, by turns."""

    def __init__(
        self, ms: Callable[[Choices], float | None], noise: Sequence[float] = (0.0,), error: float = 0.0
    ) -> None:
        self.asked: list[tuple[Choices, Choices, bool]] = []
        self.told: list[Comparison | None] = []
        self._ms, self._noise, self._error = ms, noise, error

    def key(self, choices: Choices) -> object:
        """A launch shape of 0 is today's."""
        return frozenset((each, config) for each, config in choices.items() if config)

    def compare(self, before: Choices, after: Choices, *, thoroughly: bool) -> Comparison | None:
        self.asked.append((before, after, thoroughly))
        off = self._noise[len(self.asked) % len(self._noise)]
        first, second = self._ms(before), self._ms(after)
        found = None if first is None or second is None else Comparison(first, second + off, self._error)
        self.told.append(found)
        return found


def groups_of(count: int, configs: int = 3) -> list[list[Change]]:
    """Changes of the first products: each to a launch shape that is a number."""
    return [
        [Change(product.name, {product: config}) for config in range(configs)] for product in PRODUCTS[:count]
    ]  # fmt: skip


def always() -> bool:
    return True


def sums(*saved: Sequence[float]) -> Callable[[Choices], float]:
    """Steps of which each product saves what stands at its launch shape."""
    table = {product: [0.0, *each] for product, each in zip(PRODUCTS, saved, strict=False)}
    return lambda choices: STEP_MS - sum(table[each][config] for each, config in choices.items())  # type: ignore[index]


def test_the_best_of_each_product_is_kept() -> None:
    """Also where two of them only gain together with what was kept before; what each saves is told."""
    steps = FakeSteps(sums([0.1, 0.5], [-0.2, 0.3], [-1.0, -2.0]))
    kept = select(groups_of(3), steps, always)
    assert kept.choices == {PRODUCTS[0]: 2, PRODUCTS[1]: 2}
    assert (kept.before, kept.after) == (STEP_MS, STEP_MS - 0.8)
    assert [name for name, _ in kept.changed] == [PRODUCTS[0].name, PRODUCTS[1].name]
    assert kept.done


def test_what_saves_no_more_than_noise_changes_nothing() -> None:
    """Less than the share of the step, or than the measurement may be off."""
    assert select(groups_of(1), FakeSteps(sums([0.9 * GAIN * STEP_MS, 0.0])), always).choices == {}
    assert select(groups_of(1), FakeSteps(sums([0.5, 0.0]), error=0.2), always).choices == {}
    assert select(groups_of(1), FakeSteps(sums([0.5, 0.0]), error=0.1), always).choices == {PRODUCTS[0]: 1}


def test_what_a_gpu_does_not_take_is_left_out() -> None:
    fails = FakeSteps(lambda choices: None if 2 in choices.values() else sums([0.1, 0.5])(choices))
    assert select(groups_of(1), fails, always).choices == {PRODUCTS[0]: 1}
    kept = select(groups_of(1), FakeSteps(lambda _: None), always)
    assert (kept.choices, kept.before) == ({}, 0.0)


def test_what_runs_the_same_is_not_timed_again() -> None:
    """Today's launch shape among those that are tried, and one twice."""
    steps, twice = FakeSteps(sums([0.0, 0.0])), groups_of(1)[0]
    select([[*twice, *twice]], steps, always)
    assert len([None for _, after, thoroughly in steps.asked if after and not thoroughly]) == 2


def test_time_ends() -> None:
    """Nothing new begins, and what was measured until then is kept."""
    times = iter([True] * 7)  # two products, and of the second all but its last launch shape
    steps = FakeSteps(sums([0.1, 0.5], [0.1, 0.5], [0.1, 0.5]))
    kept = select(groups_of(3), steps, lambda: next(times, False))
    assert kept.choices == {PRODUCTS[0]: 2, PRODUCTS[1]: 1}
    assert not kept.done
    assert PRODUCTS[2] not in {each for _, after, _ in steps.asked for each in after}


TIMES = st.dictionaries(
    st.tuples(*[st.integers(0, 2)] * 3), st.one_of(st.none(), st.floats(1.0, 20.0)), min_size=1, max_size=27
)


@given(TIMES, st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=5), st.integers(0, 30))
def test_a_step_is_never_slower_than_todays(
    table: dict[tuple[int, ...], float | None], noise: list[float], number: int
) -> None:
    """Whatever steps take, however wrong they are measured, and whenever time ends: nothing is kept unless the last
    comparison with today's choices says that it is faster."""
    left = [number]

    def has_time() -> bool:
        left[0] -= 1
        return left[0] >= 0

    def ms(choices: Choices) -> float | None:
        return table.get(tuple(choices.get(product, 0) for product in PRODUCTS), STEP_MS)

    steps = FakeSteps(ms, noise)
    kept = select(groups_of(3), steps, has_time)
    assert kept.after <= kept.before
    if kept.choices:
        assert steps.asked[-1] == ({}, kept.choices, True)
        last = steps.told[-1]
        assert last is not None
        assert (last.before, last.after) == (kept.before, kept.after)
        assert last.saved >= GAIN * last.before
    assert len(steps.asked) <= 3 * 2 + 3 * 2 + 1
