"""Replies that take long to take in are taken in in several turns of the event loop."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.web.fake_backend import Delta, batch


async def test_others_have_a_turn_between_replies(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have come at once, once they have taken so long."""
    monkeypatch.setattr("pagebus.web.ingress.inbox.TURN_S", -1.0)
    served = await serve(answers=False)
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x"}))
        (request,) = await served.backend.requested()
        (choice,) = served.actor.context.inbox.open_requests()[0].choices
        replies = [batch([Delta(request.request_id, "x", count)]) for count in range(1, 9)]
        end = batch([Delta(request.request_id, "", 9, finish_reason="stop")])
        await served.backend.send(served.address, *replies, end)
        seen = set()
        while choice.finish_reason is None:
            seen.add(choice.num_tokens)
            await asyncio.sleep(0)
        async with await asking as response:
            assert (await response.json())["usage"]["completion_tokens"] == 9
    assert set(range(1, 9)) <= seen
