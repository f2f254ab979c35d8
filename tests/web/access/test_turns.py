"""Long bodies are read in turn: of a client one at a time, then a rest; nobody else waits for that."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from pagebus.web.access.turns import REST, Turn, Turns
from pagebus.web.http.errors import ApiError
from pagebus.web.http.limits import BODY_TIMEOUT_S, LONG_BODY_BYTES, TURN_BODY_BYTES
from tests.helpers.waiting import until
from tests.web.fake_backend import SENTENCE, Serve, Served

SHORT = b'{"prompt": "x"}'
LONG = SHORT + b" " * TURN_BODY_BYTES


class Rests:
    """A clock that stands: rests end when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, callback: Callable[[], None]) -> None:
        self.waiting.append((seconds, callback))

    def end(self) -> list[float]:
        """All of them; how long they were."""
        ended, self.waiting = self.waiting, []
        for _, callback in ended:
            callback()
        return [seconds for seconds, _ in ended]


@pytest.fixture
def rests() -> Rests:
    return Rests()


@pytest.fixture
def turns(rests: Rests) -> Turns:
    return Turns(rests)


async def settle() -> None:
    """Whoever can go on does."""
    for _ in range(5):
        await asyncio.sleep(0)


async def use(turns: Turns, client: str, name: str, order: list[str], took_s: float = 1.0) -> None:
    with turns.of(client, alone=False) as turn:
        await turn.begin()
        order.append(name)
        turn.charge(took_s)


async def test_one_after_the_other_with_rests(turns: Turns, rests: Rests) -> None:
    """The first at once, each next one after three times what the one before took; then all is forgotten."""
    order: list[str] = []
    tasks = [asyncio.create_task(use(turns, "a", name, order, took_s)) for name, took_s in (("1", 2.0), ("2", 5.0))]
    await settle()
    assert (order, turns.num_waiting()) == (["1"], {"a": 1})
    assert rests.end() == [2.0 * REST]
    await asyncio.gather(*tasks)
    assert order == ["1", "2"]
    assert rests.end() == [5.0 * REST]
    await use(turns, "a", "3", order)
    assert order == ["1", "2", "3"]


async def test_clients_wait_for_themselves_alone(turns: Turns, rests: Rests) -> None:
    """And where several wait, all of them have together what one would have."""
    order: list[str] = []
    tasks = [asyncio.create_task(use(turns, name[0], name, order)) for name in ("a1", "a2", "b1", "b2", "c1")]
    await settle()
    assert order == ["a1", "b1", "c1"]
    assert rests.end() == [3.0, 7.0, 11.0]  # beside nobody, a, and a and b
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2"]


async def test_what_has_begun_goes_on_first(turns: Turns, rests: Rests) -> None:
    """In the order in which it asks, so that every body has its end."""
    order: list[str] = []
    first, second = (turns.of("a", alone=False) for _ in range(2))
    for turn in (first, second):
        await turn.begin()
        turn.end()
        rests.end()

    async def again(turn: Turn, name: str) -> None:
        await turn.begin()
        order.append(name)
        turn.end()

    await use(turns, "a", "resting", order)
    later = [use(turns, "a", "new", order), again(second, "second"), again(first, "first")]
    tasks = [asyncio.create_task(each) for each in later]
    for _ in later:
        await settle()
        rests.end()
    await asyncio.gather(*tasks)
    assert order == ["resting", "second", "first", "new"]


async def test_who_is_gone_holds_no_turn(turns: Turns, rests: Rests) -> None:
    """Whether it is cancelled before its turn, in the same moment, or just after."""
    order: list[str] = []
    names = ("1", "2", "3", "4", "5")
    tasks = {name: asyncio.create_task(use(turns, "a", name, order)) for name in names}
    await settle()
    tasks["2"].cancel()
    await settle()
    tasks["3"].cancel()
    rests.end()  # passes over 3, to 4 ...
    tasks["4"].cancel()  # ... which is gone before it knows
    await settle()
    rests.end()
    assert not any(result for result in await asyncio.gather(*tasks.values(), return_exceptions=True) if result is None)
    assert order == ["1", "5"]
    rests.end()
    assert turns.num_waiting() == {}


async def test_nobody_starves(turns: Turns, rests: Rests) -> None:
    """Random bodies, some cancelled: at every end of rests each client that waits is served, in its own order."""
    drawn, order, tasks = random.Random(7), [], {}
    for number in range(300):
        client = drawn.choice("aaaab")
        tasks[f"{client}{number}"] = asyncio.create_task(use(turns, client, f"{client}{number}", order))
        if drawn.random() < 0.2:
            tasks[drawn.choice(list(tasks))].cancel()
        if drawn.random() < 0.3:
            await settle()
            waited, before = [client for client, count in turns.num_waiting().items() if count], len(order)
            rests.end()
            await settle()
            assert {name[0] for name in order[before:]} >= set(waited)
    while any(not task.done() for task in tasks.values()):
        rests.end()
        await settle()
    for client in "ab":
        assert (own := [name for name in order if name[0] == client]) == sorted(own, key=lambda name: int(name[1:]))
    assert {name for name, task in tasks.items() if not task.cancelled()} <= set(order)


async def test_only_so_many_wait(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one client half of what others leave; what has begun may always come back."""
    monkeypatch.setattr("pagebus.web.access.turns.MAX_WAITING_BODIES", 4)
    tasks = [asyncio.create_task(use(turns, "a", "", [])) for _ in range(3)]
    await settle()
    with pytest.raises(ApiError, match="Too many long request bodies") as caught:
        await turns.of("a", alone=False).begin()
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    await turns.of("b", alone=False).begin()
    back = asyncio.create_task(turns.wait("a", begun=True, alone=False))
    await settle()
    assert turns.num_waiting()["a"] == 3
    for task in (*tasks, back):
        task.cancel()


async def test_a_turn_lasts_as_long_as_its_work(turns: Turns, rests: Rests) -> None:
    """Also when the client is gone: to leave early is no way to have more than one's share."""
    begun, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        goes_on.wait()
        raise ValueError

    async def read() -> None:
        with turns.of("a", alone=False) as turn:
            await turn.begin()
            await turn.work(work, long=True)

    reading = asyncio.create_task(read())
    await until(begun.is_set)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert rests.waiting == []
    goes_on.set()
    await until(lambda: bool(rests.waiting))


# -- over HTTP --------------------------------------------------------------------------------------------------------


async def post(http: aiohttp.ClientSession, served: Served, data: Any, key: str = "") -> int:
    """The status; a 200 has the right answer."""
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(served.url + "/v1/completions", headers=headers, data=data) as response:
        answer = await response.json()
        assert response.status != 200 or answer["choices"][0]["text"] == "".join(SENTENCE)
        return response.status


@pytest.mark.parametrize("size", [TURN_BODY_BYTES, LONG_BODY_BYTES])
@pytest.mark.parametrize("keys", [(), ("one", "two")])
async def test_long_bodies_wait_for_each_other(
    serve: Serve, http: aiohttp.ClientSession, turns: Turns, rests: Rests, size: int, keys: tuple[str, ...]
) -> None:
    """The first one waits for nothing. The next of the same client is not read before its turn; short ones, and long
    ones of other keys, are answered meanwhile."""
    served = await serve(api_key=keys)
    bodies = served.actor.context.bodies
    bodies.turns = turns
    long = SHORT + b" " * size
    assert await post(http, served, long, "one") == 200
    second = asyncio.create_task(post(http, served, long, "one"))
    await until(lambda: turns.num_waiting().total() == 1)
    assert not bodies.num_bytes
    assert await post(http, served, SHORT, "one") == 200
    if keys:
        assert await post(http, served, long, "two") == 200
    assert not second.done()
    assert min(rests.end()) > 0
    assert await second == 200


async def test_a_slow_body_gives_its_turn_up(
    serve: Serve, http: aiohttp.ClientSession, turns: Turns, rests: Rests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one of the same client is read while it does not go on; it is read to its end all the same."""
    monkeypatch.setattr("pagebus.web.access.arrival.BODY_STALL_S", 0.0)
    served, gate = await serve(), asyncio.Event()
    served.actor.context.bodies.turns = turns

    async def slow() -> Any:
        yield LONG
        await gate.wait()
        yield b" " * TURN_BODY_BYTES
        yield b" "

    slowly = asyncio.create_task(post(http, served, slow()))
    await until(lambda: bool(rests.waiting))
    rests.end()
    assert await post(http, served, LONG) == 200
    gate.set()
    while not slowly.done():
        rests.end()
        await asyncio.sleep(0)
    assert await slowly == 200


async def test_the_time_of_a_body_is_not_spent_waiting_for_others(
    serve: Serve, http: aiohttp.ClientSession, turns: Turns, rests: Rests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a body may take goes by before its turn."""
    served, loop = await serve(), asyncio.get_running_loop()
    served.actor.context.bodies.turns = turns
    assert await post(http, served, LONG) == 200
    waiting = asyncio.create_task(post(http, served, LONG))
    await until(lambda: turns.num_waiting().total() == 1)
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 1.5 * BODY_TIMEOUT_S)
    await settle()
    rests.end()
    assert await waiting == 200
