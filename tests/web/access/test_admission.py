"""How much may be under way at once, and when somebody who is refused should come again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter

import pytest

from pagebus.web.access.admission import MAX_RETRY_AFTER_S, Admission, Load
from pagebus.web.access.auth import ANYBODY, ApiKey
from pagebus.web.access.fair_admission import PATIENCE_S
from pagebus.web.http.errors import ApiError, too_late
from pagebus.web.requests.openai import parse_completion
from pagebus.web.requests.served_model import ServedModel
from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, batch

LARGE = ServedModel(names=("m",), vocab_size=1000, max_model_len=100_000)


def asked(**fields):
    return parse_completion({"prompt": "x", **fields}, LARGE)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refused(load: Load, requests: int, tokens: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        load.check(requests, tokens)
    return caught.value


def test_limits():
    """At a limit is allowed; above it is a 429, or a 400 if it could never be allowed."""
    load = Load(2, 100, Clock())
    load.check(2, 100)
    load.enter(1, 90)
    load.check(1, 10)

    assert refused(load, 2, 10).status == refused(load, 1, 11).status == 429
    assert refused(load, 3, 1).status == refused(load, 1, 101).status == 400
    load.leave(1, 90, 1.0)
    load.check(2, 100)


def test_tokens_per_minute():
    """A minute's worth at once, then as they come; what a call did not need is given back; Retry-After says when."""
    clock = Clock()
    admission, key = Admission(10, 10**6, clock), ApiKey("k", b"", tokens_per_minute=600)
    call = asked(prompt=[1] * 100, max_tokens=400)
    with admission.admitted(key, call, LARGE) as charge:
        with pytest.raises(ApiError) as caught, admission.admitted(key, call, LARGE):
            pass
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "40")
        charge.used_tokens = 200
    with admission.admitted(key, asked(prompt=[1] * 100, max_tokens=300), LARGE):
        pass  # whose end nobody knows: it costs all of it
    clock.now_s += 50
    with admission.admitted(key, call, LARGE), pytest.raises(ApiError), admission.admitted(key, call, LARGE):
        pass
    with pytest.raises(ApiError) as caught, admission.admitted(key, asked(max_tokens=601), LARGE):
        pass
    assert caught.value.status == 400
    assert admission.total.requests == admission.total.tokens == 0


def test_retry_after_follows_how_long_calls_take():
    """Who is refused comes again when there is room: behind all who were told a time before, and never too late."""
    clock = Clock()
    load = Load(None, 1000, clock)
    load.enter(10, 1000)
    assert [refused(load, 1, 100).headers["Retry-After"] for _ in range(2)] == ["1", "2"]  # nothing measured yet

    clock.now_s += 60
    for _ in range(100):  # 1000 tokens that take 20 s each: 50 tokens a second
        load.leave(1, 100, 20.0)
        load.enter(1, 100)

    times = [int(refused(load, 1, 100).headers["Retry-After"]) for _ in range(100)]
    assert times[:4] == [2, 4, 6, 8]
    assert times[-1] == MAX_RETRY_AFTER_S
    clock.now_s += MAX_RETRY_AFTER_S
    assert refused(load, 1, 200).headers["Retry-After"] == "4"


def test_keys_have_limits_of_their_own():
    """A key at its limit holds nobody else up; what it has counts for all; a changed limit holds at once."""
    admission = Admission(10, 1000)
    alice = ApiKey("alice", b"a", max_requests=1)
    call = asked(prompt=[1] * 10, max_tokens=10)

    with admission.admitted(alice, call, LARGE):
        with pytest.raises(ApiError):
            admission.check_room(alice)
        with admission.admitted(ANYBODY, call, LARGE):
            assert (admission.total.requests, admission.total.tokens) == (2, 40)
        admission.check_room(ApiKey("alice", b"a", max_requests=2))
    assert (admission.total.requests, admission.total.tokens) == (0, 0)
    admission.check_room(alice)


async def post(http, served, body, **headers):
    async with http.post(served.url + "/v1/completions", json=body, headers=headers) as response:
        return response.status, json.loads(await response.read()), response.headers


KEYS = tuple(ApiKey(name, b"", weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)))


def entered(admission: Admission, key: ApiKey) -> contextlib.ExitStack | None:
    """A call of this key that goes on until it is closed; None: it was refused."""
    with contextlib.ExitStack() as stack, contextlib.suppress(ApiError):
        stack.enter_context(admission.admitted(key, asked(max_tokens=1), LARGE))
        return stack.pop_all()
    return None


@pytest.mark.parametrize("rates", [(1, 1, 1), (20, 2, 4), (2, 20, 4)])
def test_places_follow_the_weights_and_not_the_rates(rates):
    """However much one key sends, all hold places by their weights, whatever each sends beyond its share."""
    rng, clock = random.Random(3), Clock()
    admission = Admission(32, 10**6, clock)
    held: dict[str, list[contextlib.ExitStack]] = {key.name: [] for key in KEYS}
    sums: Counter[str] = Counter()
    for turn in range(6000):
        clock.now_s += 0.01
        (key,) = rng.choices(KEYS, rates)
        if (call := entered(admission, key)) is not None:
            held[key.name].append(call)
        if turn % 8 == 0:
            calls = held[rng.choice([name for name, calls in held.items() for _ in calls])]
            calls.pop(rng.randrange(len(calls))).close()
        if turn >= 1000:
            sums.update({name: len(calls) for name, calls in held.items()})
    means = {name: count / 5000 for name, count in sums.items()}
    for name, share in {"a": 8, "b": 8, "c": 16}.items():
        assert abs(means[name] - share) < 1.5, means


def test_places_that_nobody_wants_are_anybodys():
    """One key alone fills the server; who was refused is waited for only until it should have come again."""
    clock = Clock()
    admission = Admission(4, 10**6, clock)
    alice, bobby, _ = KEYS
    calls = [entered(admission, alice) for _ in range(4)]
    assert entered(admission, bobby) is None
    calls[0].close()
    with pytest.raises(ApiError) as caught, admission.admitted(alice, asked(max_tokens=1), LARGE):
        pass
    assert (caught.value.status, "Retry-After" in caught.value.headers) == (429, True)
    clock.now_s += PATIENCE_S
    assert entered(admission, alice) is not None
    for call in calls[1:3]:
        call.close()
    assert entered(admission, bobby) is not None
    assert entered(admission, alice) is not None


async def test_tokens_under_way(serve, http):
    """Tokens are bounded as requests are, and are given back when the answer is out."""
    served = await serve(answers=False, max_num_queued_tokens=50)
    body = {"prompt": [1] * 10, "max_tokens": 20}
    asking = asyncio.create_task(post(http, served, body))
    (request,) = await served.backend.requested()

    status, answer, headers = await post(http, served, body)
    assert (status, answer["error"]["reason"], headers["Retry-After"]) == (429, "too_many_requests", "1")
    assert (await post(http, served, {"prompt": [1] * 10, "max_tokens": 50}))[0] == 400

    await served.backend.send(served.address, batch([Delta(request.request_id, "x", 1, finish_reason="stop")]))
    assert (await asking)[0] == 200
    assert served.actor.context.admission.total.tokens == 0


async def test_a_full_server_reads_no_bodies(serve, http):
    """Who will be refused anyway is so before the body has come."""
    served = await serve(answers=False, max_num_queued_requests=1)
    asking = asyncio.create_task(post(http, served, {"prompt": "x"}))
    (request,) = await served.backend.requested()
    body_wanted = asyncio.Event()

    async def chunks():
        yield b"{"
        await body_wanted.wait()

    async with http.post(served.url + "/v1/completions", data=chunks()) as response:
        assert response.status == 429
        body_wanted.set()
    await served.backend.send(served.address, batch([Delta(request.request_id, "x", 1, finish_reason="stop")]))
    assert (await asking)[0] == 200


async def test_bodies_together(serve, http, monkeypatch):
    """The bodies that are being read at once are bounded together, and what was read is forgotten."""
    monkeypatch.setattr("pagebus.web.access.bodies.MAX_BODIES_BYTES", 1000)
    served = await serve()

    async with http.post(served.url + "/v1/completions", data=b"x" * 1001) as response:
        assert response.status == 429
    for _ in range(3):
        assert (await post(http, served, {"prompt": "x" * 500}))[0] == 200


async def test_bodies_of_a_key(serve, http, monkeypatch):
    """A key has half of what others leave of the room for bodies: slow ones of its own do not keep others out."""
    monkeypatch.setattr("pagebus.web.access.bodies.MAX_BODIES_BYTES", 1000)
    served, gate = await serve(api_key=("one", "two")), asyncio.Event()
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

    async def slow():
        yield b'{"prompt": "' + b"x" * 388
        await gate.wait()
        yield b'"}'

    slowly = asyncio.create_task(http.post(served.url + "/v1/completions", data=slow(), headers=one))
    await until(lambda: served.actor.context.bodies.num_bytes["key 0"] == 400)
    assert (await post(http, served, {"prompt": "x" * 200}, **one))[0] == 429
    assert (await post(http, served, {"prompt": "x" * 200}, **two))[0] == 200
    gate.set()
    async with await slowly as response:
        assert response.status == 200
    assert (await post(http, served, {"prompt": "x" * 200}, **one))[0] == 200
    assert not served.actor.context.bodies.num_bytes


async def test_deadline_of_a_queued_request(serve, http):
    """A request whose time is over before anything has come is a 408, and is aborted for good."""
    served = await serve(answers=False)

    status, answer, headers = await post(
        http, served, {"prompt": ["a", "b"], "timeout": 0.001}, **{"Idempotency-Key": "k"}
    )

    assert (status, answer["error"]["param"], answer["error"]["reason"]) == (408, "timeout", "timeout")
    assert headers["x-should-retry"] == "false"
    assert len(await served.backend.aborted(2)) == 2
    assert served.backend.left == []


async def test_deadline_of_a_response(serve, http):
    """It is a 408 for who waits, and the end of one in the background."""
    served = await serve(answers=False)
    body = {"input": "x", "timeout": 0.001}
    async with http.post(served.url + "/v1/responses", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["reason"]) == (408, "timeout", "timeout")
    async with http.post(served.url + "/v1/responses", json={**body, "background": True, "stream": True}) as response:
        last = (await response.text()).split("data: ")[-1]
    failed = json.loads(last)["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert len(await served.backend.aborted(2)) == 2


async def test_deadline_in_a_stream(serve, http):
    """After the first token the deadline is an event, and the last one."""
    served = await serve(answers=False)
    body = {"prompt": "x", "stream": True, "timeout": 86400}
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=body))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1)]))
    async with await asking as response:
        inbox = served.actor.context.inbox
        inbox.end(inbox.open_requests()[0].call, too_late(86400))
        events = (await response.text()).split("\n\n")

    assert json.loads(events[-3][6:])["error"]["reason"] == "timeout"
    assert events[-2] == "data: [DONE]"
    assert await served.backend.aborted() == [request.request_id]


@pytest.mark.parametrize("timeout", [0, -1, 1e6, "1", True])
def test_bad_deadlines(timeout):
    """Seconds, more than 0 and at most a day."""
    with pytest.raises(ApiError, match="timeout"):
        asked(timeout=timeout)
    assert asked(timeout=None).timeout_s is None
    assert asked(timeout=2.5).timeout_s == 2.5


async def test_an_answer_in_time(serve, http):
    """An answer in time is an answer."""
    served = await serve()

    assert (await post(http, served, {"prompt": "x", "timeout": 60}))[0] == 200
    assert served.backend.aborts == []


def under_way(admission: Admission) -> tuple[int, int]:
    """Requests, and tokens per minute that a key has left."""
    return admission.total.requests, int(admission._rates["a"]._tokens)


def test_calls_of_clients_that_are_away():
    """They count as long as they go on: until the client is back and has all, or for as long as it may come back."""
    clock = Clock()
    admission, key = Admission(100, 10**6, clock), ApiKey("a", b"", max_requests=2, tokens_per_minute=1000)
    call = asked(max_tokens=99)  # and a token of the prompt
    for name in ("one", "two"):
        with admission.admitted(key, call, LARGE, name) as charge:
            charge.stays_s, charge.used_tokens = 30.0, 5
    with pytest.raises(ApiError):
        admission.check_room(key)
    with pytest.raises(ApiError):
        admission.check_room(key, "three")
    admission.check_room(key, "one")
    with admission.admitted(key, call, LARGE, "one"):  # back, and refused or broken off: it still goes on
        assert under_way(admission) == (2, 800)
    with admission.admitted(key, call, LARGE, "one") as charge:
        charge.used_tokens, charge.delivered = 5, True
    assert under_way(admission) == (1, 895)
    with admission.admitted(key, asked(max_tokens=49), LARGE, "two"):  # another request of the same name
        assert under_way(admission) == (2, 845)
    assert under_way(admission)[0] == 1

    clock.now_s += 30.0

    assert admission.open_tokens == 0
    assert under_way(admission)[0] == 0
    assert admission._away == {}
    assert admission._fair_admission._holders == {}


def test_one_call_on_two_connections():
    """Whichever leaves last, it is counted once."""
    admission, key = Admission(100, 10**6, Clock()), ApiKey("a", b"", max_requests=3)
    with admission.admitted(key, asked(), LARGE, "one") as charge:
        charge.stays_s = 30.0
    with (
        admission.admitted(key, asked(), LARGE, "one"),
        admission.admitted(key, asked(), LARGE, "one") as charge,
    ):
        charge.stays_s = 30.0

    assert (admission.total.requests, len(admission._away)) == (1, 1)
