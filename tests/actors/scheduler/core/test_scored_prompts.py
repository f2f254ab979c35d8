"""Requests that want log probabilities of their prompt: what is computed, and who is told what."""

from __future__ import annotations

from pagebus.bus.messages import NewSequence, TokenizedRequest
from tests.actors.scheduler.world import World, request

PROMPT = [(7 * i + i * i) % 40 for i in range(21)]


def entering(world: World, *messages: TokenizedRequest) -> list[NewSequence]:
    """The sequences that enter while these requests run to their ends."""
    before = len(world.plans)
    world.send(*messages)
    world.run()
    return [new for _, plan in world.plans[before:] for new in plan.new_sequences]


def test_a_cached_prompt_is_computed_again_and_stays_cached() -> None:
    """By the first choice; the others share what it computed, and so does the next request."""
    world = World()
    world.join()
    world.send(request("a", PROMPT, max_tokens=4))
    world.run()

    first, *others = entering(world, request("b", PROMPT, n=3, max_tokens=4, prompt_logprobs=2, logprobs=1))
    (after,) = entering(world, request("c", PROMPT, max_tokens=4, prompt_logprobs=None))

    assert (first.num_computed_tokens, first.sampling.prompt_logprobs, first.sampling.logprobs) == (0, 2, 1)
    assert [new.sampling.prompt_logprobs for new in others] == [None, None]
    assert all(new.num_computed_tokens for new in others)
    assert after.num_computed_tokens == 20
    assert after.sampling.logprobs is None
    world.check_end()


def test_after_its_first_token_a_preempted_sequence_may_use_the_cache() -> None:
    """Its prompt has been told; nothing of it is asked for again."""
    world = World()
    world.join(num_blocks=16)

    entered = entering(world, *(request(name, PROMPT[:9], max_tokens=36, prompt_logprobs=0) for name in "ab"))

    assert world.core.num_preemptions > 0
    again = [new for new in entered if new.num_tokens > new.num_prompt_tokens]
    assert again
    assert all(new.sampling.prompt_logprobs is None for new in again)
    assert all(new.sampling.prompt_logprobs == 0 for new in entered if new.num_tokens == new.num_prompt_tokens)
    world.check_end()


def test_only_one_sequence_brings_the_prompt() -> None:
    """To the detokenizer, and only if the client is to be told of it."""
    world = World()
    world.join()
    world.send(request("a", PROMPT, n=2, max_tokens=3, echo=True), request("b", PROMPT, max_tokens=3))
    world.run()

    told = {
        (heard.started.request_id, heard.started.choice_index): heard.started.prompt_token_ids.tolist()
        for heard in world.heard.values()
    }
    assert told == {("a", 0): PROMPT, ("a", 1): [], ("b", 0): []}


def test_the_mean_needs_every_state_and_the_last_one_does_not() -> None:
    """For the mean of a cached prompt all is computed again, for its last state the last block."""
    world = World()
    world.join()
    world.send(request("a", PROMPT, max_tokens=1))
    world.run()

    (mean,) = entering(world, request("b", PROMPT, max_tokens=1, pooling="mean"))
    (last,) = entering(world, request("c", PROMPT, max_tokens=1, pooling="last"))
    (other,) = entering(world, request("d", PROMPT, max_tokens=1))

    assert (mean.num_computed_tokens, mean.pooled_from) == (0, 0)
    assert (last.num_computed_tokens, last.pooled_from) == (20, 20)
    assert other.pooled_from is None
    told = {heard.started.request_id: heard.started for heard in world.heard.values()}
    assert {name: started.pooled_from for name, started in told.items()} == {"a": None, "b": 0, "c": 20, "d": None}
    assert not len(told["b"].prompt_token_ids)
    world.check_end()
