"""Clients that leave, and clients that take nothing."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from pagebus.web.http.limits import WRITE_TIMEOUT_S
from tests.helpers.waiting import until, until_empty
from tests.web.fake_backend import Delta, Served, batch


class RawClient:
    """A connection that can do what HTTP clients do not."""

    def __init__(self, served: Served, *, receive_buffer: int | None = None) -> None:
        self._served = served
        self._receive_buffer = receive_buffer

    async def __aenter__(self) -> RawClient:
        sock = socket.socket()
        if self._receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._served.actor.port))
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.writer.transport.abort()

    def post(self, **body: object) -> None:
        data = json.dumps(body).encode()
        self.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(serve, stream):
    """All of its requests are aborted, each once."""
    served = await serve(answers=False)
    async with RawClient(served) as client:
        client.post(prompt=["a", "b"], stream=stream)
        requests = await served.backend.requested(2)

    assert await served.backend.aborted(2) == [request.request_id for request in requests]
    assert served.actor.context.inbox.num_open == 0


async def test_closing_the_sending_side_is_leaving(serve):
    """TCP tells the server no more of it than of a client that is gone."""
    served = await serve(answers=False)
    async with RawClient(served) as client:
        client.post(prompt="a")
        (request,) = await served.backend.requested()
        client.writer.write_eof()

        assert await served.backend.aborted() == [request.request_id]
        assert await client.reader.read() == b""


async def test_leaving_during_a_stream(serve):
    """What has ended is not aborted, what still runs is."""
    served = await serve(answers=False)
    async with RawClient(served) as client:
        client.post(prompt=["a", "b"], stream=True)
        first, second = await served.backend.requested(2)
        deltas = [Delta(first.request_id, "x", 1, finish_reason="stop"), Delta(second.request_id, "y", 1)]
        await served.backend.send(served.address, batch(deltas))
        await client.reader.readuntil(b'"y"')

    assert await served.backend.aborted() == [second.request_id]


async def test_leaving_while_the_body_is_sent(serve):
    """Half a request is none."""
    served = await serve(answers=False)
    async with RawClient(served) as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await client.writer.drain()

    assert served.actor.context.inbox.num_open == 0
    assert served.backend.requests == []


async def test_replies_after_leaving_are_ignored(serve, http):
    """Text that comes for a client that has left harms nobody, and the mailbox is empty in the end."""
    served = await serve(answers=False)
    async with RawClient(served) as client:
        client.post(prompt="a", stream=True)
        (request,) = await served.backend.requested()
    await served.backend.aborted()
    await served.backend.send(served.address, batch([Delta(request.request_id, "late", 1, finish_reason="stop")]))
    served.backend.answers = True

    async with http.post(served.url + "/v1/completions", json={"prompt": "b"}) as response:
        assert response.status == 200
    replies = served.backend.names.replies(served.address)
    await until_empty(served.backend.bus, replies)


async def test_a_stuck_client_harms_only_itself(serve, http):
    """Its deltas are joined while it is behind, others are served, and in the end its connection is cut."""
    served = await serve(answers=False)
    context = served.actor.context
    clock_s = 0.0
    context.streams.clock = lambda: clock_s
    big = "x" * 2**20
    async with RawClient(served, receive_buffer=4096) as client:
        client.post(prompt="a", stream=True, max_tokens=500)
        (request,) = await served.backend.requested()
        for count in range(1, 9):
            await served.backend.send(served.address, batch([Delta(request.request_id, big, count)]))
        (opened,) = context.inbox.open_requests()
        await until(lambda: opened.choices[0].num_tokens == 8)
        assert len(opened.call._changed) <= 1

        served.backend.answers = True
        async with http.post(served.url + "/v1/completions", json={"prompt": "b"}) as response:
            assert response.status == 200

        assert context.streams.cut_blocked(WRITE_TIMEOUT_S) == 0
        clock_s = WRITE_TIMEOUT_S + 1
        assert context.streams.cut_blocked(WRITE_TIMEOUT_S) == 1
        assert await served.backend.aborted() == [request.request_id]
    await until(lambda: not context.streams._open)


async def test_a_client_that_does_not_take_its_whole_answer(serve):
    """It is cut as well: a Unix socket has no timeout of its own, and the call counts until it is written."""
    served = await serve(answers=False)
    context = served.actor.context
    clock_s = 0.0
    context.streams.clock = lambda: clock_s
    async with RawClient(served, receive_buffer=4096) as client:
        client.post(prompt="a")
        (request,) = await served.backend.requested()
        long = Delta(request.request_id, "x" * 2**23, 1, finish_reason="stop")
        await served.backend.send(served.address, batch([long]))
        await client.reader.readuntil(b"xxx")

        assert context.streams.cut_blocked(WRITE_TIMEOUT_S) == 0
        clock_s = WRITE_TIMEOUT_S + 1
        assert context.streams.cut_blocked(WRITE_TIMEOUT_S) == 1
        await until(lambda: context.admission.open_tokens == 0)
