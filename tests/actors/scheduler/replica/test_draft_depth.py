"""How many drafts are planned: where they pay all, and soon none where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pagebus.actors.scheduler.replica.drafts.chances import Chances
from pagebus.actors.scheduler.replica.drafts.depth import ALLOWANCE, SAVED, Depth
from pagebus.actors.scheduler.replica.drafts.prices import Prices
from pagebus.actors.scheduler.replica.drafts.watch import LOOK, MOST_REST, PATIENCE, Watch
from pagebus.actors.scheduler.replica.prefill_pacing import Pacer
from tests.actors.scheduler.drafting_executor import DraftingExecutor
from tests.actors.scheduler.fake_executor import Slot
from tests.actors.scheduler.fake_model import VOCAB, next_token
from tests.actors.scheduler.world import World, prompt, request

MOST = 4


def step_s(num_rows: int, num_drafts: int) -> float:
    """Like a large model on a fast device: up to some number of tokens a step waits for the weights."""
    return 4e-3 + 15e-6 * num_rows + 26e-6 * max(0, num_rows + num_drafts - 64)


@dataclass
class Told:
    """What a run has shown: tokens per second beside those without drafts, the drafts of each step, and which steps
    looked for some."""

    gain: float
    planned: list[int]
    looked: list[bool]


def simulate(
    rows: Callable[[int], int], chance: Callable[[int], float], num_steps: int, lag: int = 2, found: float = 1.0
) -> Told:
    """Steps of so many rows, of which the share ``found`` could have drafts where the step looks, each with such a
    chance; results come ``lag`` later. Which are accepted is spread evenly over rows and steps."""
    depth, rng = Depth(256), np.random.default_rng(1)
    tokens, plain_tokens, clock_s, plain_s = 0, 0, 0.0, 0.0
    flight, planned, looked = [], [], []
    for step in range(num_steps):
        slots = np.arange(rows(step))
        looked.append(depth.watch.looks())
        some = looked[-1] and all(looked[-lag:])  # what a step finds is verified some steps later
        wanted = np.where(rng.random(len(slots)) < found * some, MOST, 0).astype(np.int32)
        drafts = depth.choose(slots, wanted, 8192, alone=True)
        depth.prices.planned(np.full(len(slots), 500, np.int32), len(slots), int(drafts.sum()))
        planned.append(int(drafts.sum()))
        flight.append((step, slots, drafts))
        if len(flight) < lag:
            continue
        begun, slots, drafts = flight.pop(0)
        time_s = step_s(len(slots), int(drafts.sum())) * rng.normal(1, 0.01)
        depth.prices.done(clock_s, clock_s + time_s)
        right = (rng.random((len(slots), MOST)) < chance(begun)).cumprod(1).sum(1)
        accepted = np.minimum(right, drafts).astype(np.int32)
        depth.learn(slots, drafts, accepted)
        clock_s, plain_s = clock_s + time_s, plain_s + step_s(len(slots), 0)
        tokens, plain_tokens = tokens + len(slots) + int(accepted.sum()), plain_tokens + len(slots)
    return Told(tokens / clock_s / (plain_tokens / plain_s), planned, looked)


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128, 256])
@pytest.mark.parametrize("num_steps", [256, 4000])
@pytest.mark.parametrize("lag", [2, 4])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(num_rows: int, num_steps: int, lag: int) -> None:
    """The account pays for all of them, so this holds from the first step on."""
    told = simulate(lambda step: num_rows, lambda step: 0.0, num_steps, lag)
    assert sum(told.planned) > 0
    assert 1 / told.gain - 1 < SAVED / num_steps + ALLOWANCE + 0.002  # noise of the clock
    assert told.gain > 0.994


@pytest.mark.parametrize("num_rows", [1, 8, 256])
def test_prices_that_jump_cost_next_to_nothing_either(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any draft a step takes three times as long: as one that has no CUDA graph."""
    monkeypatch.setattr(
        f"{__name__}.step_s", lambda num_rows, num_drafts: (4e-3 + 15e-6 * num_rows) * (3 if num_drafts else 1)
    )
    told = simulate(lambda step: num_rows, lambda step: 0.0, 2000)
    assert told.gain > 0.99


def test_where_nothing_is_found_few_steps_look() -> None:
    """And where something is, though never right, no more."""
    for found in (0.0, 1.0):
        told = simulate(lambda step: 8, lambda step: 0.0, 2000, found=found)
        assert all(told.looked[:PATIENCE])
        assert sum(told.looked[500:]) <= 1500 * LOOK / (LOOK + MOST_REST) + LOOK


def test_the_watch_wakes() -> None:
    watch = Watch()
    looked = [watch.looks() for _ in range(1000)]
    rests = np.diff(np.flatnonzero(looked))
    assert rests.max() == MOST_REST + 1
    watch.wake()
    assert all(watch.looks() for _ in range(PATIENCE))


@pytest.mark.parametrize(("num_rows", "lag"), [(1, 2), (1, 4), (8, 2), (32, 4)])
def test_it_is_soon_noticed_that_text_repeats_itself(num_rows: int, lag: int) -> None:
    """However long there was nothing: after a rest, and what is under way."""
    for begin in range(700, 760, 7):
        phases = [0.0] * begin + [0.97] * 300
        told = simulate(lambda step: num_rows, phases.__getitem__, len(phases), lag)
        assert np.mean(told.planned[begin + MOST_REST + 60 :]) > 0.85 * num_rows * MOST


@pytest.mark.parametrize(("num_rows", "chance"), [(1, 0.5), (1, 0.95), (16, 0.8), (64, 0.95)])
def test_where_drafts_pay_they_are_planned(num_rows: int, chance: float) -> None:
    """Nearly as much is gained as by the best depth for all, which nobody knows beforehand."""
    best = max(
        sum(chance**place for place in range(depth + 1)) * step_s(num_rows, 0) / step_s(num_rows, depth * num_rows)
        for depth in range(MOST + 1)
    )
    assert best > 1.5
    assert simulate(lambda step: num_rows, lambda step: chance, 800).gain > 0.92 * best


def test_drafts_that_are_too_dear_are_left_out() -> None:
    """Half of them are right, but beside so many rows each costs more than it brings."""
    told = simulate(lambda step: 256, lambda step: 0.5, 800)
    assert told.gain > 0.985
    assert simulate(lambda step: 4, lambda step: 0.5, 400).gain > 1.5


def test_text_that_becomes_a_copy_is_noticed() -> None:
    """Trials find out, however long there was nothing: and behind the copy drafts end again."""
    phases = [0.0] * 600 + [0.97] * 900 + [0.0] * 300
    told = simulate(lambda step: 8, phases.__getitem__, len(phases))
    assert sum(told.planned[300:600]) < 300 * 8 * MOST / 40
    assert np.mean(told.planned[1150:1500]) > 0.9 * 8 * MOST
    assert sum(told.planned[1700:]) < 100 * 8 * MOST / 20


def test_a_load_that_comes_and_goes() -> None:
    told = simulate(lambda step: (1, 16, 256)[step // 30 % 3], lambda step: 0.6, 1500)
    assert told.gain > 1.0
    assert simulate(lambda step: (1, 16, 256)[step // 30 % 3], lambda step: 0.0, 1500).gain > 0.99


def test_good_rows_beside_bad_ones() -> None:
    """Each row has its own chance."""
    chances, slots = Chances(4), np.arange(4)
    for _ in range(10):
        chances.learn(slots, np.full(4, 4, np.int32), np.array([4, 0, 2, 4], np.int32))
    told = chances.of(slots)
    assert told[0] == told[3] > 0.85 > told[2] > 0.5 > 0.35 > told[1]
    chances.clear(0)
    assert told[0] > chances.of(slots[:1])[0] > told[1]


def test_a_hiccup_is_no_price() -> None:
    """One step that waits for something does not end speculation for good."""
    prices, clock_s = Prices(), 0.0
    for step in range(200):
        drafts = 0 if prices.is_plain_due(1) else 4
        prices.planned(np.array([100], np.int32), 1, drafts)
        took_s = 1.0 if step == 12 else 0.004 + 0.0001 * (drafts > 0)
        prices.done(clock_s, clock_s + took_s)
        clock_s += took_s
    assert prices.times(1, np.array([4], np.int32))[0] == pytest.approx(1.025, abs=0.02)


def test_steps_with_prompts_tell_no_price() -> None:
    """How long a chunk takes says nothing about drafts."""
    prices, clock_s = Prices(), 0.0
    for _ in range(50):
        prices.planned(np.array([100, 0], np.int32), 1, 4)
        prices.done(clock_s, clock_s + 0.1)
        clock_s += 0.1
    assert prices.times(1, np.array([4], np.int32))[0] == pytest.approx(1.2)


def test_drafts_keep_the_pace() -> None:
    """With a target for steps there are none that would exceed it."""
    pacer, clock_s = Pacer(0.010, None), 0.0
    starts, counts = np.full(8, 100, np.int32), np.ones(8, np.int32)
    for step in range(60):
        drafts = np.full(8, step % 2 * 4, np.int32)
        pacer.planned(starts, counts, 8, int(drafts.sum()))
        took_s = 0.006 + 0.0002 * int(drafts.sum())
        pacer.done(clock_s, clock_s + took_s)
        clock_s += took_s
    assert pacer.has_time(starts, counts, np.full(8, 1, np.int32))
    assert not pacer.has_time(starts, counts, np.full(8, 4, np.int32))


class Liar(DraftingExecutor):
    """None of its drafts is right."""

    def _draft(self, state: Slot) -> list[int]:
        return [(next_token(state.prefixes[-1]) + 1) % VOCAB] * self.num_drafts


def test_a_liar_is_hardly_asked() -> None:
    """The whole core, of which steps take no time that anybody knows."""
    made = World(pipeline_depth=2)
    executor = Liar(depth=2, num_drafts=3, num_blocks=256)
    made.join(executor)
    made.send(request("a", prompt(5), max_tokens=900))
    made.run()
    made.check_end()
    drafted = [int(plan.num_scheduled[: len(plan.latest_starts)].max(initial=1)) - 1 for plan in executor.plans]
    assert 0 < sum(drafted) < 80
    assert sum(drafted[400:]) <= 20
