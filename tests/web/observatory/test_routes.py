"""The page's files and its API over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from typing import Any

import aiohttp
import pytest

from pagebus.bus.messages import BlockState, CancelRequest, StateRequested
from pagebus.web.observatory.chronicle import Incident
from pagebus.web.observatory.observatory import MAX_BEHIND
from pagebus.web.routes.operate.page import POLICY, files
from tests.helpers.waiting import LIMIT_S, until
from tests.web.observatory.test_board import state

HTML = {"Accept": "text/html,*/*"}


async def test_browsers_get_the_page_and_programs_get_links(serve, http) -> None:
    served = await serve()
    async with http.get(served.url + "/", headers=HTML) as response:
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"] == POLICY
        tag = response.headers["ETag"]
    async with http.get(served.url + "/", headers={**HTML, "If-None-Match": tag}) as response:
        assert response.status == 304
    async with http.get(served.url + "/") as response:
        assert (await response.json())["links"]["events"] == "/api/events"


def test_the_policy_lets_no_script_in_that_is_not_a_file_of_ours() -> None:
    assert "script-src 'self'" in POLICY
    assert "unsafe" not in POLICY


async def test_the_page_links_files_that_never_change(serve, http) -> None:
    """Every link names the version, and may be kept for ever; under another version, or none, the browser asks again.
    All modules that the first view needs are told at once, and what only Charts needs is not among them."""
    served = await serve()
    async with http.get(served.url + "/", headers=HTML) as response:
        text = await response.text()
    links = re.findall(r'(?:href|src)="(static/[^"]+)"', text)
    assert len(links) > 30
    for link in links:
        async with http.get(f"{served.url}/{link}") as response:
            assert (response.status, "immutable" in response.headers["Cache-Control"]) == (200, True), link
    modules = set(re.findall(r'modulepreload" href="static/[^/]+/([^"]+)"', text))
    assert {"js/main.js", "js/views/chat.js", "vendor/marked/marked.esm.js"} <= modules
    assert not any("uPlot" in name or "charts" in name for name in modules)
    for path in ("v-0123/js/main.js", "js/main.js"):
        async with http.get(f"{served.url}/static/{path}") as response:
            assert (response.status, response.headers["Cache-Control"]) == (200, "no-cache")


async def test_files_are_compressed_for_those_who_take_it(serve) -> None:
    """The same bytes, in fewer."""
    served = await serve()
    async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(force_close=True)) as raw:
        for encodings, packed in (("gzip, br", True), ("gzip;q=0", False), ("identity", False)):
            async with raw.get(f"{served.url}/static/js/main.js", headers={"Accept-Encoding": encodings}) as response:
                body = await response.read()
                assert response.headers["Vary"] == "Accept-Encoding"
                assert response.headers.get("Content-Encoding", "") == ("gzip" if packed else "")
                assert (gzip.decompress(body) if packed else body) == files()["js/main.js"].body
                assert not packed or len(body) < len(files()["js/main.js"].body) / 2
        async with raw.get(f"{served.url}/static/vendor/fonts/inter.woff2") as response:
            assert "Content-Encoding" not in response.headers


async def test_only_files_of_the_page_are_served(serve, http) -> None:
    """All of them under the policy; nothing else, however it is asked for."""
    served = await serve()
    for path in files():
        async with http.get(f"{served.url}/static/{path}") as response:
            assert (response.status, response.headers["Content-Security-Policy"]) == (200, POLICY)
    for path in ("nothing.js", "../app.py", "%2e%2e/app.py", "js", ""):
        async with http.get(f"{served.url}/static/{path}") as response:
            assert response.status == 404, path


class Events:
    """Reads the events of a response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self, name: str) -> Any:
        """The data of the next event of this name."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                line = (await self._response.content.readline()).decode().rstrip("\n")
                if line == f"event: {name}":
                    return json.loads((await self._response.content.readline()).decode().removeprefix("data: "))


async def test_the_scheduler_is_asked_only_while_a_page_is_connected(serve, http) -> None:
    """The page hears the columns first, then the state; once it has left, nobody asks any more."""
    served = await serve()
    backend, observatory = served.backend, served.actor.context.observatory
    assert backend.queries == []
    backend.answer = lambda asked: state({7: [0, 1]}, cached=[3]) if isinstance(asked, StateRequested) else None
    async with http.get(served.url + "/api/events") as response:
        events = Events(response)
        hello = await events.next("hello")
        assert hello["columns"]["sequences"][0] == "id"
        shown = await events.next("state")
        assert shown["whole"] is True
        assert shown["replicas"][0]["device"]["size"] == 12
        assert "whole" not in await events.next("state")
        assert {row["kind"] for row in (await events.next("actors"))["actors"]} >= {"ingress", "scheduler"}
        assert observatory.num_watchers == 1
    await until(lambda: not observatory.num_watchers)
    asked = len(backend.queries)
    await until(lambda: not observatory._tasks)
    assert len(backend.queries) <= asked + 1


async def test_a_page_whose_data_stops_connects_again(serve, http, monkeypatch, lines) -> None:
    """A bug in one of the tasks ends the stream with a line in the log; the next connection starts all of them anew."""
    served = await serve()
    monkeypatch.setattr(served.actor.context.observatory.roster, "rows", lambda *_: [][0])
    async with http.get(served.url + "/api/events") as response:
        async with asyncio.timeout(LIMIT_S):
            assert b"event: hello" in await response.read()
    monkeypatch.undo()
    async with http.get(served.url + "/api/events") as response:
        assert (await Events(response).next("actors"))["actors"]
    errors = [line["error"] for line in lines() if line["event"] == "pages get no more data"]
    assert errors == ["IndexError: list index out of range"]


async def test_nothing_is_told_while_nothing_changes(serve, http, monkeypatch) -> None:
    """The scheduler is asked again and again, but the page hears of news only."""
    monkeypatch.setattr("pagebus.web.observatory.observatory.SAY_AGAIN_S", 1e9)
    served = await serve()
    shown = {7: [0, 1]}
    served.backend.answer = lambda asked: state(dict(shown)) if isinstance(asked, StateRequested) else None
    async with http.get(served.url + "/api/events") as response:
        events = Events(response)
        await events.next("state")
        await events.next("state")  # the same, as changes: none
        asked = len(served.backend.queries)
        await until(lambda: len(served.backend.queries) > asked + 4)
        shown[9] = [2]
        told = await events.next("state")
        assert [row[0] for row in told["sequences"]] == [7, 9], "an event in between told nothing new"


async def test_what_has_not_changed_is_told_again_now_and_then(serve, http, monkeypatch) -> None:
    """So a page knows that it is still connected."""
    monkeypatch.setattr("pagebus.web.observatory.observatory.SAY_AGAIN_S", 0.0)
    served = await serve()
    served.backend.answer = lambda asked: state({7: [0]}) if isinstance(asked, StateRequested) else None
    async with http.get(served.url + "/api/events") as response:
        events = Events(response)
        for _ in range(4):
            assert [row[0] for row in (await events.next("state"))["sequences"]] == [7]


async def test_events_are_compressed_as_they_go(serve) -> None:
    """Each can be read as soon as it is sent, and one that repeats another takes few bytes."""
    served = await serve()
    served.backend.answer = lambda asked: state({7: [0, 1]}) if isinstance(asked, StateRequested) else None
    inflate, text, size = zlib.decompressobj(31), b"", 0
    async with (
        aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(force_close=True)) as raw,
        raw.get(served.url + "/api/events", headers={"Accept-Encoding": "gzip"}) as response,
        asyncio.timeout(LIMIT_S),
    ):
        assert response.headers["Content-Encoding"] == "gzip"
        while text.count(b"event: actors") < 2:
            data = await response.content.readany()
            size += len(data)
            text += inflate.decompress(data)
    assert text.startswith(b"event: hello")
    assert size < len(text) / 2


async def test_who_comes_during_an_outage_hears_of_it(serve, http, monkeypatch) -> None:
    """Not only those who were there when it began; and what is missing is named."""
    monkeypatch.setattr("pagebus.web.observatory.scheduler_queries.ANSWER_TIMEOUT_S", 0.05)
    served = await serve()
    await served.backend.leave("executor")
    await served.refresh()
    async with http.get(served.url + "/api/events") as first:
        await Events(first).next("away")
        async with http.get(served.url + "/api/events") as second:
            events = Events(second)
            assert (await events.next("away"))["message"] == "The scheduler does not answer."
            assert (await events.next("actors"))["missing"] == ["executor"]


async def test_a_pause_is_told(serve, http) -> None:
    """As the scheduler's lease has it; while there is none, nothing is held."""
    served = await serve()
    async with http.get(served.url + "/api/events") as response:
        assert (await Events(response).next("actors"))["held"] == ""
    await served.backend.leave("scheduler")
    await served.backend.join("scheduler", held="keep")
    await served.refresh()
    async with http.get(served.url + "/api/events") as response:
        assert (await Events(response).next("actors"))["held"] == "keep"


async def test_incidents_and_errors_are_told_when_they_change(serve, http, monkeypatch) -> None:
    """At once to a page that comes, then only what is new, and to all; the figures go on from before it came."""
    monkeypatch.setattr("pagebus.web.observatory.observatory.VITALS_EVERY_S", 0.01)
    served = await serve()
    observatory = served.actor.context.observatory
    await until(lambda: observatory.history.is_kept_here and observatory.history.spans().last is not None)
    observatory.roster.chronicle.note(Incident(1.0, "died", "executor-0"))
    async with http.get(served.url + "/api/events") as response, http.get(served.url + "/api/events") as second:
        events, others = Events(response), Events(second)
        assert (await events.next("incidents"))["incidents"][0]["actor"] == "executor-0"
        assert (await events.next("failures"))["server"] == 0
        assert (await events.next("vitals"))["figures"]
        await others.next("incidents")
        observatory.roster.chronicle.note(Incident(2.0, "outage", missing=("executor",)))
        for each in (events, others):
            told = (await each.next("incidents"))["incidents"]
            assert [(one["what"], one["missing"], one["actor"]) for one in told[:2]] == [
                ("outage", ["executor"], ""), ("died", [], "executor-0"),
            ]  # fmt: skip


async def test_a_page_that_lags_behind_hears_all_again(serve) -> None:
    """The maps in full, and what is told only when it changes."""
    served = await serve()
    served.backend.answer = lambda asked: state({7: [0, 1]}) if isinstance(asked, StateRequested) else None
    observatory = served.actor.context.observatory
    watcher = observatory.watch()
    await until(lambda: not watcher.lost and "incidents" in observatory._standing)
    for _ in range(MAX_BEHIND + 1):
        watcher.tell(b"\n")
    assert watcher.behind
    await until(lambda: not watcher.behind)
    told = await watcher.events()
    assert told is not None
    assert told.index(b'"whole":true') < told.index(b"event: incidents")
    await observatory.leave(watcher)


async def test_the_blocks_of_a_request_are_told_with_those_it_shares(serve, http) -> None:
    """As the last state has them; of a request that is not there, none."""
    served = await serve()
    served.backend.answer = lambda asked: state({7: [0, 1], 9: [0, 2]}) if isinstance(asked, StateRequested) else None
    async with http.get(served.url + "/api/events") as response:
        await Events(response).next("state")
        for sequence, blocks in ((7, [0, 1]), (9, [0, 2])):
            async with http.get(f"{served.url}/api/requests/request-{sequence}/blocks") as answer:
                (told,) = (await answer.json())["sequences"]
                assert told == {"id": sequence, "replica": "gpu-0", "blocks": blocks, "host_blocks": []}
        async with http.get(f"{served.url}/api/requests/nobody/blocks") as answer:
            assert (await answer.json())["sequences"] == []


async def test_a_page_hears_that_the_scheduler_is_silent(serve, http, monkeypatch) -> None:
    monkeypatch.setattr("pagebus.web.observatory.scheduler_queries.ANSWER_TIMEOUT_S", 0.05)
    served = await serve()
    async with http.get(served.url + "/api/events") as response:
        assert (await Events(response).next("away"))["message"] == "The scheduler does not answer."


async def test_a_page_does_not_hold_up_the_end(serve, http) -> None:
    """An ingress that is drained ends its streams of events."""
    served = await serve()
    async with http.get(served.url + "/api/events") as response:
        await Events(response).next("hello")
        served.actor.request_drain()
        await served.running
        await response.content.read()


async def test_a_block_is_asked_for(serve, http) -> None:
    served = await serve()
    served.backend.answer = lambda asked: BlockState(
        serial=asked.serial, owners=(f"{asked.replica} {asked.block}",), hashes=("ab",), place=0
    )
    async with http.get(served.url + "/api/blocks?replica=gpu-0&block=5") as response:
        told = {"owners": ["gpu-0 5"], "hashes": ["ab"], "place": 0, "table": [], "first_block": 0, "adapter": ""}
        assert await response.json() == told
    async with http.get(served.url + "/api/blocks?replica=gpu-0&block=x") as response:
        assert response.status == 400


async def test_a_request_is_cancelled(serve, http) -> None:
    """By JSON only, so that no other origin's page can; the scheduler is told."""
    served = await serve()
    url = served.url + "/api/requests/chat-1%20%3Cscript%3E/cancel"
    async with http.post(url, data="") as response:
        assert response.status == 415
    async with http.post(url, json={}) as response:
        assert response.status == 200
    await until(lambda: bool(served.backend.queries))
    assert served.backend.queries == [CancelRequest(request_id="chat-1 <script>")]


@pytest.mark.parametrize("order", ["drain", "stop"])
async def test_an_order_waits_for_its_actor(serve, http, order: str) -> None:
    served = await serve()
    await until(lambda: served.actor.context.observatory.roster.find("executor", "executor-0") is not None)
    async with http.post(f"{served.url}/api/actors/executor/executor-0/{order}", json={}) as response:
        assert response.status == 200
    (told,) = await served.backend.bus.get_state("orders:executor:executor-0")
    assert told == {"epoch": served.backend.epochs["executor"], "order": order}
    for path in ("executor/nobody/drain", "executor/executor-0/explode"):
        async with http.post(f"{served.url}/api/actors/{path}", json={}) as response:
            assert response.status == 404
    served.actor.context.observatory._facts["restarts_alone"] = False
    async with http.post(f"{served.url}/api/actors/executor/executor-0/{order}", json={}) as response:
        assert response.status == 409


async def test_history_is_read_by_its_span(serve, http) -> None:
    served = await serve()
    async with http.get(served.url + "/api/history?span_s=86400") as response:
        assert (await response.json())["every_s"] == 240.0
    async with http.get(served.url + "/api/history?span_s=1") as response:
        assert response.status == 400
