"""Two tiers: preemption by swap, cached blocks on the host, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.scheduler.events import HostTierGrown, ReplicaSuspended
from pagebus.actors.scheduler.replica.host_tier import MAX_DEMOTIONS
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.bus.contract import LeaseInfo
from pagebus.bus.messages import AbortRequest
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, request

A, B, C, D = ([(i * step + step) % 40 for i in range(30)] for step in (1, 3, 7, 11))


def tight(mode: str = "swap", *, caching: bool = True, depth: int = 2, **options: Any) -> tuple[World, FakeExecutor]:
    """A world with one executor of 12 blocks of 4 tokens, and 40 host blocks."""
    world = World(preemption_mode=mode, enable_prefix_caching=caching, pipeline_depth=depth)
    return world, world.join(**{"num_blocks": 12, "num_host_blocks": 40, "max_num_seqs": 4, **options})


def replica(world: World) -> Replica:
    return world.core.replicas["gpu-0"]


def preempt_one(world: World) -> str:
    """Two requests that do not fit together: returns the name of the one that had to give way, once it has."""
    world.send(request("a", A[:16], max_tokens=20), request("b", B[:16], max_tokens=20))
    for _ in range(60):
        if replica(world).counts.num_preemptions:
            return world.preempted[0].request_id
        world.step()
    raise AssertionError("nobody was preempted")


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_computes_nothing_twice(caching: bool, depth: int) -> None:
    """Prompt and output of both requests are computed once, whatever was in flight at the preemption."""
    world, executor = tight(caching=caching, depth=depth)
    assert preempt_one(world) == "b"
    world.run()

    world.check_end()
    assert executor.num_computed == 2 * (16 + 20 - 1)
    assert executor.num_copied[0] > 0
    assert executor.num_copied[1] > 0


def test_recompute_copies_nothing_for_a_preemption() -> None:
    """With caching off nothing is copied at all."""
    world, executor = tight("recompute", caching=False)
    preempt_one(world)
    world.run()

    world.check_end()
    assert executor.num_copied == [0, 0]
    assert executor.num_computed > 2 * (16 + 20 - 1)


@pytest.mark.parametrize(("copy_tokens", "swaps"), [(0.1, True), (1.9, True), (2.1, False), (50.0, False)])
def test_auto_takes_what_is_faster(copy_tokens: float, swaps: bool) -> None:
    """A block of 4 tokens is copied twice: worth it while a copy costs less than 2 tokens of prefill."""
    world, _ = tight("auto", copy_tokens=copy_tokens, caching=False)
    preempt_one(world)
    assert bool(replica(world).host_tier.num_out) == swaps
    world.run()
    world.check_end()


@pytest.mark.parametrize(("tokens_per_s", "swaps"), [(1.0, True), (1.2, False)])
def test_how_fast_prompts_are_is_what_steps_have_shown(tokens_per_s: float, swaps: bool) -> None:
    """Not what was measured at startup: here a token a second."""
    world, _ = tight("auto", copy_tokens=1.9, caching=False)
    replica(world).prompt_rate.tokens_per_s = tokens_per_s
    preempt_one(world)
    assert bool(replica(world).host_tier.num_out) == swaps
    world.run()
    world.check_end()


@pytest.mark.parametrize("tokens_per_s", [1.0, 3.0])
def test_cached_blocks_are_kept_on_the_host_while_that_pays(tokens_per_s: float) -> None:
    """Copied out and in, a block costs 1.4 tokens of the rate at startup, and saves four."""
    world, executor = tight("auto", copy_tokens=0.7, num_blocks=10)
    replica(world).prompt_rate.tokens_per_s = tokens_per_s
    for number, tokens in enumerate((A, B, C)):
        world.send(request(f"r{number}", tokens, max_tokens=2))
        world.run()
    assert (executor.num_copied[0] > 0) == (tokens_per_s == 1.0)
    world.check_end()


def test_unmeasured_rates_mean_recompute() -> None:
    """Nobody knows what is faster."""
    world = World(preemption_mode="auto", enable_prefix_caching=False)
    executor = FakeExecutor(num_blocks=12, num_host_blocks=40, max_num_seqs=4)
    executor.copy_tokens = 0.0
    world.join(executor)
    preempt_one(world)
    assert replica(world).host_tier.num_out == 0
    world.run()
    world.check_end()


def test_without_room_on_the_host_it_is_recompute() -> None:
    """All blocks or none."""
    world, executor = tight(num_host_blocks=2, caching=False)
    preempt_one(world)
    assert executor.num_copied == [0, 0]
    world.run()
    world.check_end()


def test_a_swapped_sequence_returns_before_new_ones_start() -> None:
    """However short they are: a new one gets a slot at the earliest when the swapped one has it back."""
    world, executor = tight()
    name = preempt_one(world)
    world.send(request("new", C[:3], max_tokens=2))
    seen = 0
    while executor.queue:
        waiting = [each.request.id for each in world.core.waiting]
        assert waiting in ([name, "new"], [])
        seen += len(waiting) == 2 and replica(world).pool.num_free >= 2
        world.step()

    assert seen > 5
    world.check_end()


def test_steps_that_others_can_fill_do_not_wait_for_a_load() -> None:
    """While one sequence runs on, the other is loaded, and enters only when its copies are reported done."""
    world, executor = tight(num_blocks=30, copy_lag=3)
    a, b = request("a", A[:16], max_tokens=40), request("b", B[:16], max_tokens=30)
    world.send(a, b)
    for _ in range(6):
        world.step()
    (victim,) = (each for each in replica(world).slots.occupied() if each.request.id == "b")
    preempt(replica(world), victim)
    world.core.planner.requeue(replica(world))
    while not executor.num_copied[1]:
        world.step()
    loading = next(plan.step for plan in executor.plans if len(plan.swap_in_blocks))
    world.run()

    world.check_end()
    entered = [plan.step for plan in executor.plans for new in plan.new_sequences if new.sequence_id == victim.id]
    assert entered[1] >= loading + 3
    assert all(len(plan.slots) for plan in executor.plans if loading <= plan.step <= entered[1])


def test_alone_a_sequence_enters_with_its_load() -> None:
    """Nobody else could use the step."""
    world, executor = tight(copy_lag=1000)
    preempt_one(world)
    world.run()

    world.check_end()
    (load,) = (plan for plan in executor.plans if len(plan.swap_in_blocks))
    assert [len(load.new_sequences), len(load.slots)] == [1, 1]


def test_what_is_left_on_the_device_is_not_loaded() -> None:
    """A swapped sequence takes cached device blocks before its host blocks."""
    world, executor = tight(num_blocks=30, depth=1)
    world.send(request("a", A[:16], max_tokens=20))
    for _ in range(4):
        world.step()
    (victim,) = replica(world).slots.occupied()
    preempt(replica(world), victim)
    world.core.planner.requeue(replica(world))
    world.run()

    world.check_end()
    assert executor.num_copied[0] >= 5
    assert executor.num_copied[1] == 1  # the partial last block, which nobody can find


@pytest.mark.parametrize("end", ["abort", "lost", "suspended"])
def test_host_blocks_are_given_back(end: str) -> None:
    """Whatever becomes of a swapped sequence; on another replica it is computed again."""
    world, _ = tight()
    name = preempt_one(world)
    assert replica(world).host_tier.num_held > 0
    if end == "abort":
        world.send(AbortRequest(request_id=name))
        assert replica(world).host_tier.num_held == 0
    elif end == "suspended":
        world.send(ReplicaSuspended("gpu-0"))
        assert replica(world).host_tier.num_held == 0
        world.run()
        world.kill("gpu-0")
        world.join(name="gpu-1", num_blocks=12)
    else:
        world.kill("gpu-0")
        world.join(name="gpu-0", epoch=3, num_blocks=12)
    world.run()
    world.check_end()


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_load_ends_with_its_slot(end: str) -> None:
    """A sequence loses its slot before its blocks are there: what was to be loaded stays on the host, or goes."""
    world, executor = tight(num_blocks=30, copy_lag=1000)
    world.send(request("a", A[:16], max_tokens=40), request("b", B[:16], max_tokens=30))
    for _ in range(6):
        world.step()
    (sequence,) = world.core.requests["b"].sequences
    preempt(replica(world), sequence)
    world.core.planner.requeue(replica(world))
    while not executor.num_copied[1]:
        world.step()
    assert replica(world).host_tier.loading(sequence)
    if end == "abort":
        world.send(AbortRequest(request_id="b"))
    else:
        preempt(replica(world), sequence)
        world.core.planner.requeue(replica(world))
        world.send()
    world.run()
    world.check_end()


def test_a_sequence_may_return_on_another_replica() -> None:
    """Where it can start at once; its host blocks are given back."""
    world, _ = tight()
    name = preempt_one(world)
    world.join(name="gpu-1", num_blocks=60, num_host_blocks=4)
    world.step("gpu-0")
    world.step("gpu-0")
    assert replica(world).host_tier.num_held == 0
    assert [each.request.id for each in world.core.replicas["gpu-1"].slots.occupied()] == [name]
    world.run()
    world.check_end()


# -- cached blocks ----------------------------------------------------------------------------------------------------


def test_evicted_blocks_are_found_on_the_host() -> None:
    """A prompt that fell out of the device tier is loaded instead of computed."""
    world, executor = tight(copy_tokens=0.1)
    for name, prompt in (("a", A), ("b", B), ("c", C), ("again", A)):
        world.send(request(name, prompt, max_tokens=3))
        world.run()

    world.check_end()
    tier = replica(world).host_tier
    cached = {heard.started.request_id: heard.started.num_cached_tokens for heard in world.heard.values()}
    assert cached == {"a": 0, "b": 0, "c": 0, "again": 28}
    assert (tier.num_hits, tier.num_in) == (28, 7)
    assert tier.num_queries == 4 * 30
    assert executor.num_copied == [tier.num_out, tier.num_in]


@pytest.mark.parametrize(
    ("copy_tokens", "mode", "keeps"), [(1.9, "auto", True), (2.1, "auto", False), (9, "swap", True)]
)
def test_cached_blocks_are_kept_where_that_pays(copy_tokens: float, mode: str, keeps: bool) -> None:
    """Out and in again must be faster than computing, unless swap is forced."""
    world, _ = tight(mode, copy_tokens=copy_tokens)
    for name, prompt in (("a", A), ("b", B)):
        world.send(request(name, prompt, max_tokens=3))
        world.run()
    assert bool(replica(world).host_tier.num_out) == keeps
    world.check_end()


def test_a_block_is_copied_out_once() -> None:
    """What is on the host already needs no copy, however often it falls out of the device tier."""
    world, executor = tight(copy_tokens=0.1)
    for i in range(6):
        world.send(request(f"r{i}", (A, B)[i % 2], max_tokens=3))
        world.run()

    world.check_end()
    assert executor.num_copied[0] <= 2 * 8
    assert len(replica(world).host_tier.pool.index) <= 2 * 8


def test_demotions_per_plan_are_bounded() -> None:
    """The rest is forgotten as before."""
    world, executor = tight(copy_tokens=0.1)
    replica(world).host_tier._demotions_left = 3
    assert MAX_DEMOTIONS > 100
    world.send(request("a", A, max_tokens=3))
    world.run()
    replica(world).host_tier._demotions_left = 3
    world.send(request("b", B, max_tokens=1))
    assert max(len(plan.swap_out_blocks) for plan in executor.plans) == 3
    world.run()
    world.check_end()


def test_the_next_step_finds_its_blocks_clean() -> None:
    """What will be evicted next is copied ahead, so that a decode step copies nothing that it overwrites."""
    world, executor = tight(copy_tokens=0.1)
    world.send(request("a", A, max_tokens=3))
    world.run()
    world.send(request("b", B[:8], max_tokens=30))
    world.run()

    world.check_end()
    decodes = [plan for plan in executor.plans if plan.num_decodes and len(plan.appended_blocks)]
    assert any(len(plan.swap_out_blocks) for plan in executor.plans)
    assert not any(set(plan.swap_out_blocks.tolist()) & set(plan.appended_blocks.tolist()) for plan in decodes)


# -- membership -------------------------------------------------------------------------------------------------------


def test_a_host_tier_that_grows_is_used() -> None:
    """An executor that is ready before all of its host memory is tells so later; fewer blocks change nothing."""
    heard: list[object] = []
    membership = Membership(heard.append, lambda *_: None)
    info = {
        "state": "ready", "num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64,
        "num_host_blocks": 3, "block_bytes": 10, "copy_bytes_per_s": 1.5, "prefill_tokens_per_s": 2,
    }  # fmt: skip

    for num_host_blocks in (3, 5, 5, 8, 8, 0):
        lease = LeaseInfo(kind="executor", name="gpu-0", epoch=1, info=info | {"num_host_blocks": num_host_blocks})
        membership.look([lease])
        if num_host_blocks == 5 and membership.joining:
            joined = membership.joining.popleft()  # the core hears of it

    assert (joined.num_host_blocks, joined.block_bytes) == (5, 10)
    assert (joined.copy_bytes_per_s, joined.prefill_tokens_per_s) == (1.5, 2.0)
    assert [each for each in heard if isinstance(each, HostTierGrown)] == [HostTierGrown("gpu-0", 8)]


def test_growth_reaches_the_pool() -> None:
    """From none to some: swap begins to work."""
    world, executor = tight(num_host_blocks=0)
    executor.host = type(executor)(num_host_blocks=40).host
    executor.num_host_blocks = 40
    world.send(HostTierGrown("gpu-0", 40), HostTierGrown("gpu-9", 40))
    preempt_one(world)
    assert replica(world).host_tier.num_held > 0
    world.run()
    world.check_end()
