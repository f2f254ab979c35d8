"""``/abort_requests``: a client ends its own calls."""

from __future__ import annotations

import asyncio
import json

import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.app import IngressActor
from pagebus.web.http.errors import ApiError
from pagebus.web.routes.operate.aborts import parse_abort
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Delta, batch, start_served

KEYS = '[a]\nkey = "key-of-a"\n[b]\nkey = "key-of-b"\n'


def headers(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{key}", **more}


async def ask(http, served, key, path="/v1/completions", *, given="", **body):
    more = {"X-Request-Id": given} if given else {}
    async with http.post(served.url + path, json={"prompt": "x", **body}, headers=headers(key, **more)) as response:
        return response.status, response.headers, await response.text()


async def abort(http, served, key, **body):
    async with http.post(served.url + "/abort_requests", json=body, headers=headers(key)) as response:
        return response.status, await response.json()


@pytest.fixture
async def served(serve, tmp_path):
    (file := tmp_path / "keys.toml").write_text(KEYS)
    return await serve(answers=False, api_key_file=str(file))


async def test_by_id(served, http):
    """The id is that of the answer, which need not be the only one of its prompt; whoever waits is told."""
    asking = [asyncio.create_task(ask(http, served, "a", given=name, prompt=["x", "y"], n=2)) for name in ("p", "q")]
    await served.backend.requested(4)
    assert await abort(http, served, "a", request_ids=["cmpl-p", "cmpl-nobody"]) == (
        200, {"status": "aborted", "aborted": 1}
    )  # fmt: skip
    status, told, text = await asking[0]
    assert (status, json.loads(text)["error"]["reason"], told["x-should-retry"]) == (409, "request_cancelled", "false")
    assert len(await served.backend.aborted(2)) == 2
    assert not asking[1].done()
    await abort(http, served, "a")
    assert (await asking[1])[0] == 409


@pytest.mark.parametrize("header", ["", "h"])
async def test_ids_of_bodies(served, http, header):
    """What a body calls itself is in its answer and in the header, unless the client's header says otherwise."""
    asking = asyncio.create_task(ask(http, served, "a", given=header, request_id="b"))
    (request,) = await served.backend.requested()
    name = header or "b"
    assert request.request_id.startswith(f"cmpl-{name}-")
    assert (await abort(http, served, "a", request_ids=[f"cmpl-{name}"]))[1]["aborted"] == 1
    assert (await asking)[1]["X-Request-Id"] == name


async def test_all_of_a_key(served, http):
    """Nobody else's, whatever ids are named."""
    asking = {key: asyncio.create_task(ask(http, served, key, given=key)) for key in "ab"}
    await served.backend.requested(2)
    assert (await abort(http, served, "b", request_ids=["cmpl-a"]))[1]["aborted"] == 0
    assert (await abort(http, served, "b", request_ids=[]))[1]["aborted"] == 1
    assert (await asking["b"])[0] == 409
    assert not asking["a"].done()
    assert (await abort(http, served, "a"))[1]["aborted"] == 1
    await asking["a"]


async def test_a_stream(served, http):
    """Ends with an error event after what has come; and it does not wait for its client, which might come back."""
    body = {"prompt": "x", "stream": True}
    asking = asyncio.create_task(
        http.post(served.url + "/v1/completions", json=body, headers=headers("a", **{"Idempotency-Key": "again"}))
    )
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "so far", 1, text_offset=0)]))
    async with await asking as response:
        assert (await abort(http, served, "a"))[1]["aborted"] == 1
        text = await response.text()
    assert "so far" in text
    assert "request_cancelled" in text
    assert text.split("data: [DONE]\n")[1].startswith("id: ")
    assert (await served.backend.aborted(), served.backend.left) == ([request.request_id], [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "model": MODEL.name}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
    ],
)
async def test_by_key(served, http, path, body):
    """Before anything of the answer has come, and so its id; not another's call with the same key."""
    calls = {key: headers(key, **{"Idempotency-Key": "again"}) for key in "ab"}
    asking = {key: asyncio.create_task(http.post(served.url + path, json=body, headers=calls[key])) for key in "ab"}
    await served.backend.requested(2)
    assert (await abort(http, served, "a", idempotency_keys=["other"]))[1]["aborted"] == 0
    assert (await abort(http, served, "a", idempotency_keys=["again"]))[1]["aborted"] == 1
    assert (await asking["a"]).status == 409
    assert (len(await served.backend.aborted()), served.backend.left) == (1, [])
    assert not asking["b"].done()
    assert (await abort(http, served, "b"))[1]["aborted"] == 1
    await asking["b"]


async def test_at_another_ingress(http):
    """Whichever is asked: clients cannot choose."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), answers=False)
    other = IngressActor(Settings(port=0, lease_ttl_s=60.0), MemoryBus(server), "ingress-1", model=MODEL)
    running = asyncio.create_task(other.run())
    await until(lambda: other.state == "ready")
    await served.refresh()
    asking = [asyncio.create_task(http.post(f"http://127.0.0.1:{other.port}/v1/completions", json={"prompt": "x"}))]
    asking.append(asyncio.create_task(http.post(f"{served.url}/v1/completions", json={"prompt": "y"})))
    await served.backend.requested(2)
    assert await abort(http, served, "") == (200, {"status": "aborted", "aborted": 1})
    assert [(await each).status for each in asking] == [409, 409]
    assert len(await served.backend.aborted(2)) == 2
    other.request_drain()
    await running
    await other.bus.close()
    await served.stop()


@pytest.mark.parametrize("ids", ["x", [1], ["y" * 257], {"a": 1}])
def test_what_is_refused(ids):
    """By the field's name."""
    with pytest.raises(ApiError, match="request_ids"):
        parse_abort({"request_ids": ids}, MODEL)
