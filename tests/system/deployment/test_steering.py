"""An operator pauses a deployment, empties its caches, and has its executors sleep."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import LIMIT_S, eventually, until
from tests.system.deployment.test_serve import Serve
from tests.system.deployment.test_serve import serve as serve  # the fixture
from tests.system.serving import Client, serving

pytestmark = pytest.mark.share(6)

PROMPT = list(range(1, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


async def call(client: Client, method: str, path: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.request(method, client.url + path) as response:
        return response.status, await response.json()


async def readyz_is(client: Client, status: int, word: str) -> bool:
    return await call(client, "GET", "/readyz") == (status, {"status": word})


async def test_pause_and_resume(folder) -> None:
    """What runs stands still, what comes waits, and both go on with the tokens that they would have had."""
    async with serving(folder) as client:
        whole = await client.completion(PROMPT, max_tokens=200, ignore_eos=True)
        assert await call(client, "POST", "/pause?mode=keep") == (200, {"status": "paused"})
        assert await call(client, "GET", "/is_paused") == (200, {"is_paused": True})
        asking = asyncio.create_task(client.completion(PROMPT, max_tokens=200, ignore_eos=True))
        scheduler = client.actors["scheduler"]
        await until(lambda: len(scheduler.core.requests) == 1)
        assert await call(client, "POST", "/resume") == (200, {"status": "resumed"})
        assert (await asking)["choices"] == whole["choices"]
        assert await call(client, "GET", "/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_pause_that_refuses(folder, mode) -> None:
    """Until it is over new requests get a 503; those under way too, or they come to their end."""
    async with serving(folder) as client:
        asking = asyncio.create_task(client.status("completions", "a", prompt=PROMPT, max_tokens=300, ignore_eos=True))
        scheduler = client.actors["scheduler"]
        await until(lambda: scheduler.core.num_running == 1)
        assert await call(client, "POST", f"/pause?mode={mode}") == (200, {"status": "paused"})
        status, answer = await asking
        assert status == (503 if mode == "abort" else 200), answer
        status, answer = await client.status("completions", "b", prompt=PROMPT)
        assert (status, "paused" in answer["error"]["message"]) == (503, True)
        assert scheduler.core.at_rest
        await eventually(lambda: readyz_is(client, 503, "paused"))  # the scheduler's lease is renewed for that
        assert (await call(client, "GET", "/health"))[0] == 200  # who watches over it has nothing to restart
        assert await call(client, "POST", "/resume") == (200, {"status": "resumed"})
        await client.completion(PROMPT, max_tokens=2)
        await eventually(lambda: readyz_is(client, 200, "ok"))


async def test_a_scheduler_that_takes_over(folder) -> None:
    """Goes on with the pause of the one before it."""
    async with serving(folder, lease_ttl_s=1.0) as client:
        await call(client, "POST", "/pause?mode=keep")
        await client.replace(
            "scheduler", client.actors["tokenizer"].bus.__class__(client.actors["tokenizer"].bus.server)
        )
        await until(lambda: client.actors["scheduler"].state == "ready")
        assert client.actors["scheduler"].core.held == "keep"


async def test_caches_are_emptied(folder) -> None:
    """A prompt that was found is computed again."""
    async with serving(folder) as client:
        found = []
        for resets in (False, False, True):
            if resets:
                assert await call(client, "POST", "/reset_prefix_cache") == (200, {"success": True})
            usage = (await client.completion(PROMPT, max_tokens=2, ignore_eos=True))["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 48, 0]


@pytest.mark.parametrize(
    ("path", "param"),
    [("/pause?mode=stop", "mode"), ("/pause?clear_cache=perhaps", "clear_cache"), ("/sleep?level=3", "level"),
     ("/wake_up?tags=dreams", "tags"), ("/reset_prefix_cache?all=1", "all")],
)  # fmt: skip
async def test_what_is_refused(folder, path, param) -> None:
    """By the parameter's name. And where all actors share a process, none can sleep."""
    async with serving(folder) as client:
        status, answer = await call(client, "POST", path)
        assert (status, answer["error"]["param"]) == (400, param)
        status, answer = await call(client, "POST", "/sleep")
        assert (status, answer["error"]["message"]) == (
            409, "All actors share one process here: none can sleep alone."
        )  # fmt: skip


async def test_what_the_server_is(folder) -> None:
    async with serving(folder) as client:
        _, told = await call(client, "GET", "/server_info?config_format=json")
        assert told["vllm_config"]["max_num_seqs"] == 256
        _, told = await call(client, "GET", "/server_info")
        assert "max_num_seqs=256" in told["vllm_config"]


async def test_sleep(serve: Callable[..., Any]) -> None:
    """Executors give back what they hold, and answer as before when they are woken, with all that was named."""
    server: Serve = await serve()
    await server.ready()
    answer = await server.answer()

    def post(path: str) -> dict[str, Any]:
        request = urllib.request.Request(server.url + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT_S) as told:
            found: dict[str, Any] = json.load(told)
            return found

    def get(path: str) -> Any:
        with urllib.request.urlopen(server.url + path, timeout=LIMIT_S) as told:
            return json.load(told)

    old = server.children()["executor-0"]
    assert await asyncio.to_thread(post, "/sleep?level=1&mode=wait") == {"status": "sleeping", "level": 1}
    assert not old.is_running()
    assert await asyncio.to_thread(get, "/is_sleeping") == {"is_sleeping": True}
    assert await asyncio.to_thread(post, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert await asyncio.to_thread(post, "/wake_up?tags=kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    assert await asyncio.to_thread(get, "/is_sleeping") == {"is_sleeping": False}
    assert await server.answer_once_back() == answer
