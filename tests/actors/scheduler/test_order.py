"""Priorities, jobs, ageing: who goes first, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import math
import random

import pytest
from msgspec import structs

from pagebus.actors.scheduler.core.new_request import make_request
from pagebus.actors.scheduler.core.waiting import JobQueue
from pagebus.actors.scheduler.order import INTERACTIVE, JOB, JOB_BOOST, JOB_STEPS, Order
from pagebus.bus.messages import TokenizedRequest
from tests.actors.scheduler.world import World, request

AGING_S = 30.0


def ask(name: str, length: int = 4, *, at_s: float = 0.0, is_job: bool = False, **options: int) -> TokenizedRequest:
    seed = sum(map(ord, name))
    made = request(name, [(7 * i + 13 * seed) % 40 for i in range(length)], **options)
    return structs.replace(made, arrived_s=at_s, is_job=is_job)


def names(world: World) -> list[str]:
    """Requests in the order in which they started."""
    return [each.started.request_id for each in world.heard.values()]


def test_the_static_order_is_that_of_ageing_at_any_time() -> None:
    """Whoever stands better after ageing, is due first: at every time, for every pair."""
    rng = random.Random(1)
    order = Order(aging_s=AGING_S)
    for _ in range(500):
        (a, p), (b, q) = ((rng.uniform(0, 100), rng.randrange(-5, 5)) for _ in range(2))
        now_s = rng.uniform(100, 500)
        aged = (p - (now_s - a) / AGING_S) < (q - (now_s - b) / AGING_S)
        assert aged == (order.deadline_s(a, p, is_job=False) < order.deadline_s(b, q, is_job=False))


def test_first_come_first_served_knows_no_priorities() -> None:
    """Whatever number comes over the bus."""
    order = Order(priorities=False)
    assert order.deadline_s(5.0, -100, is_job=False) == 5.0


@pytest.mark.parametrize("arrived_s", [math.nan, math.inf, -math.inf])
def test_a_nonsense_arrival_does_not_break_the_order(arrived_s: float) -> None:
    """It counts as unknown."""
    assert Order().deadline_s(arrived_s, 1, is_job=False) == AGING_S


def test_a_job_is_not_born_old() -> None:
    """However urgent it claims to be, it waits for some steps."""
    assert Order().deadline_s(0.0, -1000, is_job=True) == AGING_S * (JOB_STEPS - JOB_BOOST)


def test_waiting_makes_up_for_priority() -> None:
    """After one step of ageing, priority 1 that has waited goes before a fresh 0, but not before that."""
    for waited_s, first in ((29.0, "fresh"), (31.0, "old")):
        world = World()
        world.send(ask("old", priority=1), ask("fresh", at_s=waited_s, priority=0))
        world.join(max_num_seqs=1)
        world.run()
        world.check_end()
        assert names(world)[0] == first


def test_jobs_start_after_all_interactive_requests() -> None:
    """Also after those that came later or have a worse priority number."""
    world = World()
    world.send(ask("job", is_job=True, priority=-5), ask("a", at_s=1.0, priority=50), ask("b", at_s=2.0))
    world.join(max_num_seqs=1)
    world.run()
    world.check_end()
    assert names(world) == ["b", "a", "job"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_job_gives_its_slot_up_within_one_step(depth: int) -> None:
    """The next plan made after an interactive request has come starts it, and a job makes room."""
    world = World(pipeline_depth=depth)
    executor = world.join(max_num_seqs=2)
    world.send(ask("old", is_job=True, max_tokens=40), ask("new", at_s=1.0, is_job=True, max_tokens=40))
    for _ in range(5):
        world.step()
    planned = len(executor.plans)
    world.send(ask("chat", max_tokens=5))
    world.step()
    (started,) = [new for plan in executor.plans[planned : planned + 1] for new in plan.new_sequences]
    assert world.heard[started.sequence_id].started.request_id == "chat"
    world.run()
    world.check_end()
    preempted = [each.request_id for each in world.preempted]
    assert preempted == ["new"]


def test_a_job_gives_its_blocks_up_for_an_interactive_prompt() -> None:
    """Slots are free but blocks are not: jobs go, the last first, no more than needed."""
    world = World()
    world.join(num_blocks=24, max_num_seqs=8)
    world.send(*(ask(f"job{i}", 20, at_s=float(i), is_job=True, max_tokens=8) for i in range(3)))
    for _ in range(3):
        world.step()
    world.send(ask("chat", 34, max_tokens=4))
    world.step()
    assert names(world)[-1] == "chat"
    assert {each.request_id for each in world.preempted} == {"job2"}
    world.run()
    world.check_end()


def test_a_long_job_prompt_does_not_delay_an_interactive_one() -> None:
    """While a job's prompt is read in chunks, an interactive prompt is read first."""
    world = World()
    executor = world.join(budget=16, num_blocks=200, max_model_len=512)
    world.send(ask("job", 300, is_job=True, max_tokens=2))
    world.step()
    planned = len(executor.plans)
    world.send(ask("chat", 14, at_s=1.0, max_tokens=3))
    world.step()
    plan = executor.plans[planned]
    assert [world.heard[new.sequence_id].started.request_id for new in plan.new_sequences] == ["chat"]
    assert sorted(plan.num_scheduled.tolist()) == [2, 14]
    world.run()
    world.check_end()


def test_interactive_requests_do_not_preempt_each_other_to_start() -> None:
    """As in vLLM, a better priority number waits for a slot."""
    world = World()
    world.join(max_num_seqs=1)
    world.send(ask("a", max_tokens=9))
    world.step()
    world.send(ask("b", priority=-50, max_tokens=9))
    world.run()
    world.check_end()
    assert world.core.num_preemptions == 0


def test_an_old_job_becomes_interactive_once_per_step_of_ageing() -> None:
    """Of many jobs that are due, one is promoted per ageing time; it stands as if it had arrived now."""
    jobs = JobQueue(AGING_S)
    made = [make_request(ask(f"j{i}", is_job=True, at_s=float(i)), (), Order()) for i in range(3)]
    for each in made:
        jobs.add(each)
    deadline_s = AGING_S * JOB_STEPS
    assert jobs.pop_due(deadline_s - 1) is None
    assert jobs.pop_due(deadline_s + 100) is made[0]
    assert jobs.pop_due(deadline_s + 100) is None
    jobs.discard(made[1])
    jobs.discard(made[1])
    assert jobs.pop_due(deadline_s + 100 + AGING_S) is made[2]
    assert len(jobs) == 0


def test_a_promoted_job_is_not_displaced_any_more() -> None:
    """It runs when it is promoted; then neither its slot nor its blocks go to somebody who came later."""
    world = World(priority_aging_s=1.0)
    world.join(max_num_seqs=1)
    world.send(ask("job", is_job=True, max_tokens=60))
    world.step()
    world.now_s = JOB_STEPS + 1.0
    world.step()
    assert not world.core.planner.jobs
    world.send(ask("chat", at_s=world.now_s, max_tokens=3))
    world.run()
    world.check_end()
    assert world.core.num_preemptions == 0


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_jobs_do_not_starve_under_endless_interactive_traffic(max_num_seqs: int) -> None:
    """With more interactive requests than can ever run at once, each of two jobs ends all the same."""
    world = World(priority_aging_s=0.05)
    world.join(max_num_seqs=max_num_seqs, num_blocks=16 * max_num_seqs)
    world.send(*(ask(f"job{i}", is_job=True, max_tokens=20) for i in range(2)))
    jobs = {"job0", "job1"}
    for _ in range(3000):
        while len(world.core.requests) < max_num_seqs + 4:
            world.send(ask(f"r{len(world.requests)}", at_s=world.now_s, max_tokens=6))
        world.step()
        if not jobs & world.core.requests.keys():
            break
    else:
        raise AssertionError("a job starves")
    assert world.now_s > JOB_STEPS * 0.05
    world.run()
    world.check_end()


def test_a_low_priority_does_not_starve_under_endless_high_ones() -> None:
    """With blocks for hardly two, it is preempted again and again, but not for ever."""
    world = World(priority_aging_s=0.1)
    world.join(max_num_seqs=4, num_blocks=14)
    world.send(ask("low", 8, priority=5, max_tokens=30))
    for _ in range(4000):
        while len(world.core.requests) < 6:
            world.send(ask(f"r{len(world.requests)}", 8, at_s=world.now_s, priority=-5, max_tokens=20))
        world.step()
        if "low" not in world.core.requests:
            break
    else:
        raise AssertionError("it starves")
    world.run()
    world.check_end()


def test_levels_are_on_the_bus() -> None:
    """A job stays one in the core, until it ends."""
    world = World()
    world.send(ask("a"), ask("b", is_job=True))
    assert [world.core.requests[name].priority_class for name in "ab"] == [INTERACTIVE, JOB]
