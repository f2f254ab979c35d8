"""Health says the truth, new requests believe it, and the end is orderly."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from pagebus.actors.settings import SettingsError
from pagebus.bus.contract import BusUnavailable
from pagebus.web.ingress.membership import Membership
from pagebus.web.server.listener import listen
from tests.helpers.waiting import eventually, until
from tests.web.fake_backend import KINDS, Delta, batch


async def get(http, served, path):
    async with http.get(served.url + path) as response:
        return response.status, json.loads(await response.read())


async def test_healthy(serve, http):
    """200 when one actor of each kind is ready; /health says also how all of them are."""
    served = await serve()

    assert await get(http, served, "/readyz") == (200, {"status": "ok"})
    status, body = await get(http, served, "/health")
    assert (status, body["status"], body["progressing"], body["open_requests"]) == (200, "ok", True, 0)
    assert body["actors"] == {kind: {name: "ready"} for kind, name in KINDS}


async def test_an_executor_stalls(serve, http):
    """Steps do not advance: the executor does not count any more, and which one it is can be seen."""
    served = await serve()
    await served.backend.leave("executor")
    await served.backend.join("executor", stalled_s=31.5)
    await served.refresh()

    status, body = await get(http, served, "/health")

    assert (status, body["missing"], body["progressing"]) == (503, ["executor"], False)
    assert body["actors"]["executor"] == {"executor-0": "stalled for 31.5 s"}
    assert (await get(http, served, "/livez"))[0] == 200


async def test_graphs_are_captured(serve, http):
    """It is ready, and how far it is with its graphs can be seen until all are there."""
    served = await serve()
    for captured, state in ((12, "ready (12 of 96 graphs)"), (96, "ready")):
        await served.backend.leave("executor")
        await served.backend.join("executor", num_graphs=captured, num_planned_graphs=96)
        await served.refresh()
        status, body = await get(http, served, "/health")
        assert (status, body["actors"]["executor"]) == (200, {"executor-0": state})


async def test_busy_is_not_dead(serve, http):
    """A full server is ready, and its probes are answered although every request is refused."""
    served = await serve(answers=False, max_num_queued_requests=1)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x"}))
    (request,) = await served.backend.requested()

    async with http.post(served.url + "/v1/completions", json={"prompt": "y"}) as refused:
        assert refused.status == 429
    assert (await get(http, served, "/health"))[0] == 200
    assert (await get(http, served, "/readyz"))[0] == 200

    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1, finish_reason="stop")]))
    async with await asking as response:
        assert response.status == 200


async def test_load(serve, http):
    """How many requests are under way, without a key: a balancer asks."""
    served = await serve(answers=False, api_key=("k",))
    assert await get(http, served, "/load") == (200, {"server_load": 0})
    headers = {"Authorization": "Bearer k"}
    asking = asyncio.create_task(
        http.post(served.url + "/v1/completions", json={"prompt": ["x", "y"]}, headers=headers)
    )
    await served.backend.requested(2)
    assert await get(http, served, "/load") == (200, {"server_load": 2})
    asking.cancel()
    await served.backend.aborted(2)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
async def test_an_actor_is_missing(serve, http, kind):
    """503 that names it, and new requests are told to come again; /livez and /ping stay 200."""
    served = await serve()
    await served.backend.leave(kind)
    await served.refresh()

    status, body = await get(http, served, "/health")
    assert (status, body["missing"]) == (503, [kind])
    async with http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert kind in (await response.json())["error"]["message"]
    for path in ("/livez", "/ping"):
        assert (await get(http, served, path))[0] == 200

    await served.backend.join(kind)
    await served.refresh()
    assert (await get(http, served, "/health"))[0] == 200


async def test_an_executor_loads(serve, http):
    """An executor that loads does not count, and how far it is can be seen."""
    served = await serve()
    await served.backend.leave("executor")
    await served.backend.join("executor", "loading", progress=0.5)
    await served.refresh()

    status, body = await get(http, served, "/health")

    assert (status, body["missing"]) == (503, ["executor"])
    assert body["actors"]["executor"] == {"executor-0": "loading (50%)"}


async def test_ranks_are_shown_beside_their_executor(serve, http):
    """If there are any; what counts is the executor, which is ready once all its ranks are."""
    served = await serve()
    assert "rank" not in (await get(http, served, "/health"))[1]["actors"]
    loading = {"state": "loading", "progress": 0.5}
    await served.backend.bus.acquire_lease("rank", "executor-0.1", loading, ttl_s=60)
    await served.refresh()

    status, body = await get(http, served, "/health")

    assert (status, body["actors"]["rank"]) == (200, {"executor-0.1": "loading (50%)"})


async def test_the_bus_is_away(serve):
    """A view of the leases that cannot be renewed is not believed for long."""
    served = await serve()
    now_s = 0.0
    membership = Membership(served.backend.bus, fresh_s=5, clock=lambda: now_s)
    assert membership.missing() == ("bus",)
    await membership.refresh()
    assert membership.missing() == ()
    now_s = 5.1
    assert membership.missing() == ("bus",)


async def test_the_bus_takes_no_writes(serve, http):
    """/health says why, and a new request is refused at once instead of waiting for it."""
    served = await serve()
    served.actor.bus_trouble = "lease: OOM (Redis has reached maxmemory)"

    status, body = await get(http, served, "/health")
    assert (status, body["missing"], body["bus"]) == (503, ["bus"], "lease: OOM (Redis has reached maxmemory)")
    async with http.post(served.url + "/v1/completions", json={"prompt": "y"}) as refused:
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        assert "does not reach its message bus (Redis)" in (await refused.json())["error"]["message"]

    served.actor.bus_trouble = ""
    assert (await get(http, served, "/health"))[1]["bus"] == "ok"


async def test_drain(serve, http):
    """A draining ingress takes nothing new, lets streams end, and then goes."""
    served = await serve(answers=False, drain_timeout_s=30)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1)]))
    async with await asking as response:
        served.actor.request_drain()

        status, body = await get(http, served, "/health")
        assert (status, body["missing"]) == (503, ["draining"])
        async with http.post(served.url + "/v1/completions", json={"prompt": "y"}) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert not served.running.done()

        await served.backend.send(served.address, batch([Delta(request.request_id, "b", 2, finish_reason="stop")]))
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await served.running
    assert served.backend.aborts == []


async def test_drain_beside_another_ingress_at_the_same_port(serve, http):
    """New connections go to the other one, as this one would refuse them; who is connected is told to leave."""
    served = await serve(answers=False, drain_timeout_s=30, ingresses=2)
    here = {"host": socket.gethostname(), "port": served.actor.port}
    await served.backend.bus.acquire_lease("ingress", "ingress-1", {"state": "ready", **here}, ttl_s=1e6)
    await served.refresh()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()
    served.actor.request_drain()

    async def refused() -> bool:
        try:
            _, other = await asyncio.open_connection("127.0.0.1", served.actor.port)
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was in the queue of connections when the socket was closed
            return False
        other.close()
        return False

    await eventually(refused)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.read()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nConnection: close\r\n" in head
    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1, finish_reason="stop")]))
    async with await asking as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    writer.close()
    await served.running


async def test_drain_times_out(serve, http):
    """What has not ended in time is told so and aborted."""
    served = await serve(answers=False, drain_timeout_s=0.05)
    streaming = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1)]))
    async with await streaming as response:
        waiting = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "y"}))
        await served.backend.requested(2)

        served.actor.request_drain()

        async with await waiting as refused:
            assert refused.status == 503
        events = (await response.text()).split("\n\n")
    assert "shutting down" in events[-3]
    assert events[-2] == "data: [DONE]"
    await served.running
    await served.backend.aborted(2)


async def test_port_is_taken(serve):
    """The error names the port, and the lease says which port was bound."""
    served = await serve()

    assert served.actor.lease_info()["port"] == served.actor.port
    with pytest.raises(SettingsError, match=str(served.actor.port)):
        await listen("127.0.0.1", served.actor.port)
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1.* give another --host"):
        await listen("192.0.2.1", 0)
    with pytest.raises(SettingsError, match="no-such-host"):
        await listen("no-such-host.invalid", 0)


async def test_a_shared_port():
    """Several may listen on one port if all of them want to."""
    (first,) = await listen("127.0.0.1", 0, share=True)
    (second,) = await listen("127.0.0.1", first.getsockname()[1], share=True)
    assert first.getsockname() == second.getsockname()
    first.close()
    second.close()


async def test_bus_failure_is_survived(serve, http, monkeypatch):
    """While the bus is away the mailbox is asked again and again; nothing is lost."""
    served = await serve()
    bus = served.actor.bus
    real, failures = bus.read, []

    async def failing(*args, **kwargs):
        if len(failures) < 1:
            failures.append(1)
            raise BusUnavailable("away")
        return await real(*args, **kwargs)

    monkeypatch.setattr(bus, "read", failing)
    async with http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 200
    async with http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 200
    await until(lambda: bool(failures))
