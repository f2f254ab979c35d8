"""Blocks that sequences share: what they cost, what counts as a hit, and in which order they go."""

from __future__ import annotations

import pytest
from msgspec import structs

from pagebus.bus.messages import TokenizedRequest
from tests.actors.scheduler.world import World, prompt, request


def cached(world: World) -> dict[str, set[int]]:
    """What each request was told of cached tokens, over its choices."""
    told: dict[str, set[int]] = {}
    for heard in world.heard.values():
        told.setdefault(heard.started.request_id, set()).add(heard.started.num_cached_tokens)
    return told


def test_the_prompt_of_many_choices_is_held_once() -> None:
    """n=8 on a prompt of 2048 tokens: within 10% of prompt + 8 x output blocks, at any time."""
    world = World(block_size=16)
    executor = world.join(num_blocks=2000, block_size=16, budget=8192, max_num_seqs=16, max_model_len=4096)
    num_output = 80
    world.send(request("a", prompt(2048), block_size=16, n=8, max_tokens=num_output))
    pool, most = world.core.replicas["gpu-0"].pool, 0
    while world.core.requests:
        most = max(most, pool.num_blocks - pool.num_free)
        world.step()
    world.run()
    world.check_end()
    assert most <= 1.1 * (2048 / 16 + 8 * num_output / 16)
    assert executor.num_computed <= 2048 + 8 * num_output + 8 * 16


def test_choices_of_one_request_are_no_hits() -> None:
    """The usage tells what was cached before the request came, for each choice; and the lookup is counted once."""
    world = World()
    world.join()
    world.send(request("a", prompt(21), n=3, max_tokens=4))
    world.run()
    world.send(request("b", prompt(21), n=3, max_tokens=4))
    world.run()
    world.check_end()
    assert cached(world) == {"a": {0}, "b": {20}}
    replica = world.core.replicas["gpu-0"]
    assert (replica.counts.prefix_queries, replica.counts.prefix_hits) == (42, 20)


def test_what_a_preempted_sequence_finds_of_its_own_is_no_hit() -> None:
    """It is looked up once, when it starts."""
    world = World()
    world.join(num_blocks=16)
    world.send(*(request(name, prompt(9, i), max_tokens=36) for i, name in enumerate("ab")))
    world.run()
    world.check_end()
    replica = world.core.replicas["gpu-0"]
    assert world.core.num_preemptions > 0
    assert (replica.counts.prefix_queries, replica.counts.prefix_hits) == (18, 0)
    assert cached(world) == {"a": {0}, "b": {0}}


def test_a_sequence_that_moves_to_another_replica_is_not_looked_up_again() -> None:
    """Its usage stays, and the other replica counts nothing."""
    world = World()
    world.join(name="gpu-0")
    world.send(request("a", prompt(9), max_tokens=30))
    for _ in range(7):
        world.step("gpu-0")
    world.join(name="gpu-1", epoch=9)
    world.kill("gpu-0")
    world.run()
    world.check_end()
    assert world.core.replicas["gpu-1"].counts.prefix_queries == 0


def salted(name: str, salt: str | None, tokens: list[int]) -> TokenizedRequest:
    made = structs.replace(request(name, tokens, max_tokens=9), cache_salt=salt)
    return structs.replace(made, block_hashes=made.block_hashes[:0])


@pytest.mark.parametrize("other", [None, "y"])
def test_a_salt_covers_generated_tokens_too(other: str | None) -> None:
    """The second turn of a chat finds the first turn's answer, but no other tenant does."""
    world = World()
    world.join()
    world.send(salted("first", "x", prompt(12)))
    world.run()
    said = next(iter(world.heard.values())).tokens
    turn = [*prompt(12), *said, 1, 2, 3]
    for name, salt in (("stranger", other), ("second", "x")):
        world.send(salted(name, salt, turn))
        world.run()
    world.check_end()
    assert cached(world) == {"first": {0}, "stranger": {0}, "second": {20}}


def test_eviction_takes_leaves_and_leaves_the_shared_prefix() -> None:
    """Two chats share a system prompt; room for a third is made of their own blocks, the older chat's first."""
    world = World()
    world.join(num_blocks=12)
    system, size = prompt(16), 4
    for i, name in enumerate("ab"):
        world.send(request(name, system + prompt(12, i + 1), max_tokens=1))
        world.run()
    world.send(request("new", prompt(20, 7), max_tokens=1))
    world.run()
    replica = world.core.replicas["gpu-0"]
    found = {}
    for i, name in enumerate("ab"):
        hashes = request(name, system + prompt(12, i + 1)).block_hashes
        found[name] = len(replica.index.match([hashes[j : j + 4].tobytes() for j in range(0, len(hashes), 4)], 99))
    assert found["a"] == len(system) // size
    assert found["b"] == len(system) // size + 3
    world.check_end()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "copies"), [(23, 2), (24, 2), (21, 0)])
def test_forks_take_over_all_but_the_last_token(length: int, copies: int, caching: bool) -> None:
    """Full blocks are shared, the last one is copied unless the last token begins it; with and without a cache."""
    world = World(enable_prefix_caching=caching)
    executor = world.join()
    world.send(request("a", prompt(length), n=3, max_tokens=6))
    world.run()
    world.check_end()
    assert [new.num_computed_tokens for plan in executor.plans for new in plan.new_sequences] == [0] + 2 * [length - 1]
    assert sum(len(plan.copy_sources) for plan in executor.plans) == copies
    assert executor.num_computed == length + 2 + 3 * 5
    assert cached(world) == {"a": {0}}


def test_a_fork_without_a_first_choice_computes_its_prompt() -> None:
    """The first one is over before the others get a slot: they find its full blocks in the cache."""
    world = World()
    executor = world.join(max_num_seqs=1)
    world.send(request("a", prompt(23), n=3, max_tokens=2))
    world.run()
    world.check_end()
    assert [new.num_computed_tokens for plan in executor.plans for new in plan.new_sequences] == [0, 20, 20]
    assert cached(world) == {"a": {0}}


@pytest.mark.parametrize("num_blocks", range(8, 22))
def test_forks_in_a_tight_pool_get_their_tokens(num_blocks: int) -> None:
    """Whoever is preempted between a fork's admission and its copy: contents are right, and nothing leaks."""
    world = World(pipeline_depth=3)
    world.join(num_blocks=num_blocks, max_num_seqs=7, budget=16)
    world.send(request("a", prompt(11), n=4, max_tokens=18), request("b", prompt(10, 1), n=4, max_tokens=19))
    world.run()
    world.check_end()
