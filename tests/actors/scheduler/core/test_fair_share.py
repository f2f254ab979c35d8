"""Fair shares of clients: in proportion to weights, without punishment or credit, and unknown to who has no name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pagebus.actors.scheduler.core.fair_share import KEPT_CLIENTS, FairShare
from pagebus.bus.messages import TokenizedRequest
from tests.actors.scheduler.world import World, request


def ask(name: str, client: str, length: int = 4, max_tokens: int = 4, *, weight: float = 1.0) -> TokenizedRequest:
    """A request with a prompt of its own: nothing of it is cached."""
    seed = sum((place + 1) * ord(letter) for place, letter in enumerate(name))
    made = request(name, [(7 * i + 13 * seed) % 997 for i in range(length)], max_tokens=max_tokens)
    return structs.replace(made, client=client, weight=weight)


def served(world: World) -> list[str]:
    """Clients in the order in which their requests started."""
    return [world.requests[each.started.request_id].client for each in world.heard.values()]


def run(asked: Sequence[TokenizedRequest], **options: int) -> World:
    """All that is asked for comes at once, before there is an executor."""
    world = World()
    world.send(*asked)
    world.join(**{"max_num_seqs": 1, **options})
    world.run()
    world.check_end()
    return world


def test_a_flood_delays_nobody_else() -> None:
    """A client whose two requests come after a hundred of another's is served next, and next but one."""
    world = World()
    world.send(*(ask(f"flood{i}", "flood") for i in range(100)))
    world.join(max_num_seqs=1)
    for _ in range(20):
        world.step()
    started = len(served(world))
    world.send(ask("a", "quiet"), ask("b", "quiet"))
    world.run()
    world.check_end()
    assert 3 < started < 20
    assert served(world)[started : started + 4].count("quiet") == 2


def test_weights() -> None:
    """Three to one."""
    world = run([ask(f"{client}{i}", client, weight=w) for client, w in (("a", 1.0), ("b", 3.0)) for i in range(40)])
    assert Counter(served(world)[:40]) == {"a": 10, "b": 30}


@settings(max_examples=25)
@given(
    weights=st.tuples(st.sampled_from([0.5, 1.0, 2.0, 5.0]), st.sampled_from([0.5, 1.0, 2.0, 5.0])),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=4, max_size=40),
)
def test_no_client_is_ahead_by_more_than_one_request(weights, sizes) -> None:
    """While both have work: what they were served, divided by their weights, differs by at most the largest request of
    each (the bound of start-time fair queueing)."""
    asked = [
        ask(f"{client}{i}", client, length, max_tokens, weight=weight)
        for client, weight in zip("ab", weights, strict=True)
        for i, (length, max_tokens) in enumerate(sizes)
    ]
    world = run(asked)
    cost = {each.request_id: len(each.prompt_token_ids) + each.sampling.max_tokens for each in asked}
    largest = max(cost.values())
    left, tokens = {"a": len(sizes), "b": len(sizes)}, {"a": 0, "b": 0}
    for heard in world.heard.values():
        name = heard.started.request_id
        tokens[name[0]] += cost[name]
        left[name[0]] -= 1
        if not all(left.values()):
            break
        ahead = abs(tokens["a"] / weights[0] - tokens["b"] / weights[1])
        assert ahead <= largest / weights[0] + largest / weights[1]


def test_what_was_used_alone_is_not_held_against_a_client() -> None:
    """Who has had everything for an hour has its half, as soon as another comes, and no less."""
    world = World()
    world.join(max_num_seqs=1)
    for i in range(50):
        world.send(ask(f"alone{i}", "a", 20))
        world.run()
    world.send(*(ask(f"{client}{i}", client) for client in "ab" for i in range(10)))
    world.run()
    world.check_end()
    assert Counter(served(world)[50:60])["a"] in (4, 5)  # the last one that it had alone was the first of these


def test_a_pause_earns_nothing() -> None:
    """Who comes late shares from then on."""
    world = World()
    world.send(*(ask(f"a{i}", "a") for i in range(40)))
    world.join(max_num_seqs=1)
    while len(served(world)) < 20:
        world.step()
    started = len(served(world))
    world.send(*(ask(f"b{i}", "b") for i in range(40)))
    world.run()
    world.check_end()
    assert Counter(served(world)[started : started + 20])["b"] in (10, 11)


def test_what_was_not_needed_is_given_back() -> None:
    """A request that ends early costs what it took: its client's next one starts the earlier for it."""
    shares = FairShare()
    shares.start("a", 1.0, 10_000, 0.0)
    shares.give_back("a", 1.0, 9_000)
    assert shares.start("a", 1.0, 10, 0.0) == 1.0
    world = World()
    world.join(max_num_seqs=1)
    world.stop_at[("early", 0)] = 1
    world.send(ask("early", "a", max_tokens=800))
    world.run()
    world.send(ask("next", "a", max_tokens=1))
    assert world.core.requests["next"].start_s < 0.05


def test_without_names_the_order_is_that_of_arrival() -> None:
    """Nothing is kept, and nothing moves."""
    shares = FairShare()
    assert [shares.start("", 1.0, 10**6, float(i)) for i in range(3)] == [0.0, 1.0, 2.0]
    assert shares.not_after(5.0) == 5.0
    world = run([ask(f"r{i}", "") for i in range(5)])
    assert [heard.started.request_id for heard in world.heard.values()] == [f"r{i}" for i in range(5)]


def test_clocks_of_clients_that_say_nothing_are_forgotten() -> None:
    """However many names there were."""
    shares = FairShare()
    for number in range(3 * KEPT_CLIENTS):
        shares.serve("x", shares.start(f"client{number}", 1.0, 100, 0.0) + number)
    assert len(shares._ends_s) <= KEPT_CLIENTS + 1
