"""Chunks of prefill that keep streams smooth, on a virtual clock."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import ReplicaResult
from pagebus.actors.scheduler.replica.prefill_pacing import (
    FREE_TOKENS,
    HURRY_STEPS,
    LEAST_CHUNK_TOKENS,
    PRESSED,
    Pacer,
    Prefill,
)
from pagebus.actors.scheduler.replica.step_time import StepTime, Work
from pagebus.bus.messages import StepPlan, StepResult
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, request

pytestmark = pytest.mark.share(6)

ITL_S = 0.03
HOP_S = 0.0004
Law = Callable[[Work], float]


def h200(work: Work) -> float:
    """Weights are read once, then tokens cost; other terms and another form than the fit has."""
    tokens = work.decodes + work.prefill
    time_s = max(0.006, 3e-5 * tokens) + 3e-9 * work.pairs + 4e-8 * work.decode_context
    return time_s + (0.0015 if work.prefill else 0.0002)


def slow(work: Work) -> float:
    """A small machine: half of the target goes by before any prefill; other streams weigh more the longer they are."""
    return 0.012 + 1e-4 * (work.decodes + work.prefill) + 4e-9 * work.pairs + 1e-7 * work.decode_context


def eager(work: Work) -> float:
    """As measured on an H200 with an 8B model: decodes are one graph, steps with prefill wait for their launches."""
    tokens = work.decodes + work.prefill
    time_s = max(0.005, 2.35e-5 * tokens) + 1.3e-9 * work.pairs + 2e-8 * work.decode_context
    return max(0.0136, time_s) if work.prefill else time_s


@dataclass
class TimedExecutor(FakeExecutor):
    """Steps take the time of a law, with noise of some percent."""

    law: Law = h200
    noise: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rng = random.Random(7)
        self.free_s = 0.0
        self.arrivals: deque[float] = deque()

    def run_timed(self) -> StepResult:
        """The next plan's result, with times."""
        plan = self.queue[0]
        launched_s, time_s = self.arrivals.popleft(), 0.0
        result = self.run_one()
        if len(plan.slots):
            time_s = self.law(self._work(plan)) * max(0.5, self.rng.gauss(1.0, self.noise))
        self.free_s = max(self.free_s, launched_s) + time_s
        return structs.replace(result, launched_s=launched_s, done_s=self.free_s)

    def _work(self, plan: StepPlan) -> Work:
        slots, counts = plan.slots.tolist(), plan.num_scheduled.tolist()
        starts = [self.slots[slot].computed - count for slot, count in zip(slots, counts, strict=True)]
        n = plan.num_decodes
        pairs = sum(c * (s + c / 2) for s, c in zip(starts[n:], counts[n:], strict=True))
        return Work(decodes=n, decode_context=sum(starts[:n]), prefill=sum(counts[n:]), pairs=pairs)


@dataclass
class Clock:
    """A world whose time is the executor's."""

    world: World
    executor: TimedExecutor
    token_times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def send(self, *messages: object) -> None:
        before = len(self.executor.plans)
        self.world.send(*messages)  # type: ignore[arg-type]
        self.executor.arrivals.extend([self.world.now_s + HOP_S] * (len(self.executor.plans) - before))

    def step(self) -> None:
        result = self.executor.run_timed()
        self.world.now_s = max(self.world.now_s, result.done_s + HOP_S)
        for sequence_id in result.sequence_ids.tolist():
            self.token_times[self.world.heard[sequence_id].started.request_id].append(result.done_s)
        self.world._listen(result)
        self.send(ReplicaResult("gpu-0", result))


def run(
    law: Law, *, itl_s: float | None, ttft_s: float | None = None, noise: float = 0.05, at_once: int = 0
) -> tuple[Clock, float]:
    """16 streams decode, then a prompt of 16k tokens arrives. Returns what happened, and when the prompt arrived.
    ``at_once``: the streams have prompts of so many tokens and arrive together."""
    world = World(block_size=16, itl_target_s=itl_s, ttft_target_s=ttft_s)
    executor = TimedExecutor(
        law=law, noise=noise, num_blocks=4000, block_size=16, max_num_seqs=32, max_model_len=20_000, budget=8192
    )
    world.join(executor)
    clock = Clock(world, executor)
    prompts = [[(7 * j + i) % 40 for j in range(at_once or 20 + i)] for i in range(16)]
    streams = [request(f"stream{i}", prompt, block_size=16, max_tokens=2000) for i, prompt in enumerate(prompts)]
    for together in [streams] if at_once else [[each] for each in streams]:
        clock.send(*together)
    for _ in range(100):
        clock.step()
    arrived_s = world.now_s
    long = structs.replace(
        request("long", [(3 * j * j + j) % 40 for j in range(16_384)], block_size=16, max_tokens=4), arrived_s=arrived_s
    )
    clock.send(long)
    while "long" in world.core.requests:
        clock.step()
    for _ in range(20):
        clock.step()
    return clock, arrived_s


def measure(pacer: Pacer, decodes: int, prefill: int, time_s: float) -> None:
    """One step of the pacer's replica, with one chunk of a prompt's begin."""
    counts = np.array([1] * decodes + [prefill], np.int32)
    pacer.planned(np.zeros(len(counts), np.int32), counts, decodes)
    began_s = pacer._last_done_s
    pacer.done(began_s, began_s + time_s)


def longest_gap_s(clock: Clock) -> float:
    return max(
        later - sooner
        for name, times in clock.token_times.items()
        if name != "long"
        for sooner, later in pairwise(times)
    )


@pytest.mark.parametrize("law", [h200, slow])
def test_no_gap_is_twice_the_target_while_a_long_prompt_is_read(law: Law) -> None:
    """16 streams, a prompt of 16k tokens, a law that the fit does not know; and the time allowed is made use of."""
    clock, arrived_s = run(law, itl_s=ITL_S)
    assert longest_gap_s(clock) < 2 * ITL_S
    prefills = [plan for plan in clock.executor.plans if plan.num_decodes == 16 and len(plan.slots) == 17]
    times = [later - sooner for sooner, later in pairwise(clock.token_times["stream0"])]
    reading = sorted(times)[-len(prefills) :]
    assert sum(reading) / len(reading) > 0.6 * ITL_S
    assert clock.token_times["long"][0] > arrived_s


@pytest.mark.parametrize("itl_s", [0.015, 0.02, 0.03])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_first_long_prompt_is_read_in_steps_that_were_tried(itl_s: float, noise: float) -> None:
    """All that is known of prefill is one step of 8192 tokens without decodes, which says little of others."""
    clock, arrived_s = run(eager, itl_s=itl_s, noise=noise, at_once=512)
    assert longest_gap_s(clock) < 2 * itl_s
    assert clock.token_times["long"][0] - arrived_s < {0.015: 8.0, 0.02: 1.2, 0.03: 0.8}[itl_s]


def test_without_a_target_a_long_prompt_stops_the_streams() -> None:
    """What the target is for: full chunks take many times as long."""
    clock, _ = run(h200, itl_s=None)
    assert longest_gap_s(clock) > 5 * ITL_S


def test_a_late_first_token_makes_chunks_larger_but_not_twice() -> None:
    """With the other target in danger, the prompt is read faster; streams still hold twice the target."""
    patient, patient_from_s = run(slow, itl_s=ITL_S)
    pressed, pressed_from_s = run(slow, itl_s=ITL_S, ttft_s=0.2)
    assert longest_gap_s(pressed) < 2 * ITL_S
    patient_s = patient.token_times["long"][0] - patient_from_s
    assert pressed.token_times["long"][0] - pressed_from_s < 0.75 * patient_s


def test_steps_without_decodes_are_full() -> None:
    """Nobody streams, so nobody is disturbed."""
    world = World(itl_target_s=0.001)
    executor = world.join(budget=64, num_blocks=100, max_model_len=400)
    world.send(request("a", [(7 * i) % 40 for i in range(200)], max_tokens=1))
    world.run()
    assert [plan.num_scheduled.tolist() for plan in executor.plans[:4]] == [[64], [64], [64], [8]]


def test_prefill_goes_on_where_the_target_cannot_be_met() -> None:
    """A least chunk, whatever decodes take."""
    pacer = Pacer(0.001, None)
    for _ in range(50):
        pacer.law.learn(Work(decodes=4, decode_context=100), 0.5)
        pacer.law.learn(Work(decodes=4, decode_context=100, prefill=64, pairs=4000), 0.6)
    rows = [Prefill(0, 20), Prefill(10, 500), Prefill(0, 500)]
    assert pacer.share(0.0, Work(decodes=4, decode_context=100), rows, 4096) == [20, LEAST_CHUNK_TOKENS - 20, 0]


def test_the_first_chunks_grow_from_small() -> None:
    """Before prefill has been measured nothing is known of its cost."""
    pacer = Pacer(ITL_S, None)
    rows = [Prefill(0, 5000)]
    assert pacer.share(0.0, Work(decodes=1), rows, 4096) == [LEAST_CHUNK_TOKENS]
    measure(pacer, 1, 100, 0.001)
    assert pacer.share(0.0, Work(decodes=1), rows, 4096) == [144]


def test_the_first_chunks_need_half_of_the_target_where_prompts_were_timed() -> None:
    """At the rate measured at start; and after many short ones, the next burst begins so too."""
    pacer = Pacer(ITL_S, None, tokens_per_s=50_000)
    rows = [Prefill(0, 5000)]
    assert pacer.share(0.0, Work(decodes=1), rows, 4096) == [736]
    for _ in range(200):
        measure(pacer, 1, 40, 0.1 * ITL_S)
    assert pacer.share(0.0, Work(decodes=1), rows, 4096) == [736]


def test_a_rate_that_was_too_good_is_forgotten_for_a_while() -> None:
    """A step that took too long counts more than what was measured at start."""
    pacer = Pacer(ITL_S, None, tokens_per_s=50_000)
    measure(pacer, 1, 400, 4 * ITL_S)
    assert pacer.tried == pytest.approx(100)
    measure(pacer, 1, 80, 0.5 * ITL_S)
    assert pacer.tried < 110


def test_a_chunk_that_was_too_long_makes_the_next_ones_shorter() -> None:
    """At once, and in proportion, however long the law takes to see why."""
    pacer = Pacer(ITL_S, None)
    for _ in range(50):
        measure(pacer, 1, 1000, 0.5 * ITL_S)
    assert pacer.tried == 1000
    measure(pacer, 1, 1500, 3 * ITL_S)
    assert pacer.tried == pytest.approx(500)
    assert pacer.share(0.0, Work(decodes=1), [Prefill(0, 5000)], 4096) == [736]


def test_steps_without_decodes_try_nothing() -> None:
    """They are as large as can be, and say little of those beside decodes."""
    pacer = Pacer(ITL_S, None)
    measure(pacer, 0, 8192, 0.2)
    assert pacer.share(0.0, Work(decodes=1), [Prefill(0, 5000)], 4096) == [LEAST_CHUNK_TOKENS]


def test_a_share_never_exceeds_the_budget() -> None:
    """Nor what rows want."""
    pacer = Pacer(10.0, 0.1)
    measure(pacer, 1, 4000, 0.001)
    rows = [Prefill(0, 30, 0.0), Prefill(0, 50, 0.0), Prefill(0, 10, 0.0)]
    assert pacer.share(5.0, Work(decodes=1), rows, 60) == [30, 30, 0]
    assert pacer.share(5.0, Work(decodes=1), rows, 600) == [30, 50, 10]


def calm_share(rows: list[Prefill], *, now_s: float = 0.0, decodes: int = 10) -> list[int]:
    """Of a step that has room for 736 tokens of prompts."""
    return Pacer(ITL_S, None, tokens_per_s=50_000).share(now_s, Work(decodes=decodes), rows, 4096)


def test_few_short_prompts_are_read_one_after_the_other() -> None:
    """Together as far as they are free; whoever goes on behind its first token is not kept waiting."""
    assert calm_share([Prefill(0, 100, 0.0)] * 3) == [100, 0, 0]
    assert calm_share([Prefill(0, 40, 0.0)] * 5) == [40, 40, 40, 0, 0]
    assert calm_share([Prefill(0, 100, 0.0), Prefill(0, 100), Prefill(0, 100, 0.0)]) == [100, 100, 0]


def test_no_prompt_gives_way_for_longer_than_two_targets() -> None:
    rows = [Prefill(0, 100, 0.0), Prefill(0, 100, 0.0), Prefill(0, 100, 0.01)]
    assert calm_share(rows, now_s=HURRY_STEPS * ITL_S) == [100, 100, 0]


def test_all_prompts_are_read_at_once_where_none_is_free_or_many_wait() -> None:
    """Longer prompts, or many decodes, compute for longer than weights are read; what two steps do not hold hurries."""
    assert calm_share([Prefill(0, 151, 0.0)] * 3) == [151, 151, 151]
    assert calm_share([Prefill(0, 100, 0.0)] * 3, decodes=FREE_TOKENS) == [100, 100, 100]
    assert calm_share([Prefill(0, 100, 0.0)] * 14) == [100] + [0] * 13
    assert calm_share([Prefill(0, 100, 0.0)] * 15) == [100] * 7 + [36] + [0] * 7


def test_prompts_that_come_together_get_their_first_tokens_one_after_the_other() -> None:
    """Beside streams whose own prompts were longer than all of theirs."""
    world = World(block_size=16, itl_target_s=ITL_S)
    executor = TimedExecutor(
        noise=0.0, num_blocks=4000, block_size=16, max_num_seqs=32, max_model_len=2000, budget=8192
    )
    world.join(executor)
    clock = Clock(world, executor)
    prompts = [[(7 * j + i) % 40 for j in range(600)] for i in range(8)]
    for i, prompt in enumerate(prompts):
        clock.send(request(f"stream{i}", prompt, block_size=16, max_tokens=200))
    for _ in range(60):
        clock.step()
    others = [[(3 * j * j + 5 * i) % 39 for j in range(100)] for i in range(3)]
    together = [request(f"late{i}", prompt, block_size=16, max_tokens=9) for i, prompt in enumerate(others)]
    clock.send(*(structs.replace(each, arrived_s=world.now_s) for each in together))
    for _ in range(10):
        clock.step()
    answered = [clock.token_times[f"late{i}"][0] for i in range(3)]
    assert answered == sorted(set(answered))


def test_the_law_finds_the_weights_and_keeps_them_unused() -> None:
    """After decodes only, for long, the cost of prefill is still known."""
    law, rng = StepTime(), random.Random(3)

    def true_s(work: Work) -> float:
        return 0.004 + 2e-5 * work.decodes + 3e-5 * work.prefill + 2e-9 * work.pairs + 1e-8 * work.decode_context

    for i in range(5000):
        prefill = rng.randrange(64, 4000) if i < 300 and i % 2 else 0
        start = rng.randrange(0, 8000)
        work = Work(rng.randrange(1, 64), rng.randrange(0, 60_000), prefill, prefill * (start + prefill / 2))
        law.learn(work, true_s(work) * rng.gauss(1, 0.03))
    for prefill in (100, 1000, 3000):
        work = Work(16, 8000, prefill, prefill * 4000.0)
        assert law.predict_s(work) == pytest.approx(true_s(work), rel=0.15)


def test_even_steps_of_decodes_do_not_slow_down_what_is_learnt_of_prefill() -> None:
    """Their errors are tiny, so much of what is new about a first long prompt would pass for a hiccup."""
    law, rng = StepTime(), random.Random(3)
    for _ in range(300):
        law.learn(Work(16, 10_000), 0.0046 * rng.gauss(1, 0.001))
    for _ in range(4):
        law.learn(Work(16, 10_000, 1000, 1000 * 500.0), 0.025)
    law.learn(Work(16, 10_000, 1000, 1000 * 2500.0), 0.0282)
    assert law.predict_s(Work(16, 10_000, 1000, 1000 * 4500.0)) == pytest.approx(0.0314, rel=0.05)


def test_outliers_do_not_bend_the_law_but_change_does() -> None:
    """One step of a hundredfold time moves nothing much; steps that stay slower are believed."""
    law, work = StepTime(), Work(8, 1000)
    rng = random.Random(5)
    for _ in range(200):
        law.learn(work, 0.010 * rng.gauss(1, 0.02))
    law.learn(work, 1.0)
    law.learn(work, -1.0)
    assert law.predict_s(work) == pytest.approx(0.010, rel=0.05)
    for _ in range(200):
        law.learn(work, 0.020)
    assert law.predict_s(work) == pytest.approx(0.020, rel=0.05)


def test_more_prefill_is_never_predicted_to_be_quicker() -> None:
    """Whatever was measured, the most that fits a time is the most that fits."""
    law, rng = StepTime(), random.Random(9)
    for _ in range(300):
        law.learn(Work(rng.randrange(0, 9), rng.randrange(0, 99), rng.randrange(0, 99), rng.random()), rng.random())
        time_s, start = rng.random(), rng.randrange(0, 1000)
        most = law.prefill_in(time_s, start)
        if most < 1e9:
            assert law.prefill_s(start, most) == pytest.approx(time_s)


def test_pressed_stays_below_twice() -> None:
    """Some room is left for noise."""
    assert 1 < PRESSED < 2


def few_rows(work: Work) -> float:
    """Rows weigh much: 20 of them take the target."""
    return 0.01 + 0.001 * work.decodes + 1e-5 * work.prefill


@pytest.mark.parametrize("law", [few_rows, h200])
def test_as_many_jobs_run_beside_streams_as_keep_the_target(law: Law) -> None:
    """All that the law has room for, and no more; without streams, as many as there are slots."""
    world = World(block_size=16, itl_target_s=ITL_S)
    executor = TimedExecutor(
        law=law, noise=0.01, num_blocks=4000, block_size=16, max_num_seqs=64, max_model_len=2000, budget=8192
    )
    world.join(executor)
    clock = Clock(world, executor)
    clock.send(*(request(f"stream{i}", list(range(5 + i)), block_size=16, max_tokens=280) for i in range(8)))
    for _ in range(50):
        clock.step()
    jobs = [request(f"job{i}", [j % 40 for j in range(9 + i % 7)], block_size=16, max_tokens=30) for i in range(500)]
    clock.send(*(structs.replace(job, is_job=True, arrived_s=world.now_s) for job in jobs))
    for _ in range(200):
        clock.step()
    most = max(len(plan.slots) for plan in executor.plans[100:250])
    gaps = sorted(later - sooner for sooner, later in pairwise(clock.token_times["stream0"][100:250]))
    assert gaps[int(0.99 * len(gaps))] < 1.2 * ITL_S
    assert 16 < most <= 21 if law is few_rows else most == 64
    while any(name.startswith("stream") for name in world.core.requests):
        clock.step()
    for _ in range(20):
        clock.step()
    assert max(len(plan.slots) for plan in executor.plans[-10:]) == 64
