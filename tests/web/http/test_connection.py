"""Connections that are no good: broken HTTP, heads that do not end, too many of them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest

from pagebus.web.http.connection import network_of
from pagebus.web.http.limits import MAX_HEADERS, MAX_LINE_BYTES
from tests.helpers.waiting import until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def exchange(served, data: bytes) -> tuple[int, dict, bytes]:
    """Send bytes; the status, the JSON body and the head of the answer, after which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), head


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/0.9\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * MAX_LINE_BYTES + b" HTTP/1.1\r\n\r\n",
        POST + b"X: " + b"x" * (MAX_LINE_BYTES + 1) + b"\r\n\r\n",
        POST + b"".join(b"X-%d: x\r\n" % i for i in range(MAX_HEADERS + 1)) + b"\r\n",
        POST + b"no colon\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_broken_http(serve, caplog, data):
    """A 400 in our shape that says what the limits are; nothing of it gets into the log, and no traceback."""
    caplog.set_level(logging.INFO)
    served = await serve()

    status, body, _ = await exchange(served, data)

    assert (status, body["error"]["reason"]) == (400, "invalid_http")
    assert str(MAX_LINE_BYTES) in body["error"]["message"]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 200), ("/", 200), ("/nothing", 404), ("/v1/files", 404), ("/api/events", 405),
     ("/v1/responses/resp_1?stream=true", 405)],
)  # fmt: skip
async def test_heads(serve, path, status):
    """Nothing follows the head: else a proxy would take it for the beginning of the next answer."""
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()

    assert (int(head.split()[1]), body) == (status, b"")


async def test_a_stream_over_http_1_0_ends_its_connection(serve):
    """HTTP/1.0 has no chunks, so nothing else says where the stream ends, also if the client wants to keep it open."""
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    body = b'{"prompt":"x","stream":true,"max_tokens":2}'
    head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(2 * (head + body))

    answer = await reader.read()
    writer.close()

    assert (answer.count(b"HTTP/1.0 200 "), answer.count(b"data: [DONE]")) == (1, 1)


async def test_broken_chunks(serve):
    """A body whose chunks are broken is a 400."""
    served = await serve()

    status, body, _ = await exchange(
        served, POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n\r\n"
    )

    assert (status, body["error"]["reason"]) == (400, "invalid_http")


@pytest.mark.parametrize("chunks", [b"zz\r\n\r\n", b"1\r\n{\r\nzz\r\n\r\n", b"2\r\n{}x\r\n0\r\n\r\n"])
async def test_chunks_that_break_behind_their_head(serve, chunks):
    """Whoever reads such a body is told at once, and the connection ends: nothing after it could be understood."""
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    writer.write(POST + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
    await reader.readuntil(b"100 Continue\r\n\r\n")

    writer.write(chunks)
    answer = await reader.read()
    writer.close()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert (head.split()[1], json.loads(body)["error"]["reason"]) == (b"400", "invalid_http")


async def test_unknown_expectation(serve):
    """``Expect`` with anything but 100-continue is a 417 in our shape."""
    served = await serve()

    status, body, _ = await exchange(served, POST + b"Expect: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    assert (status, list(body)) == (417, ["error"])


@pytest.mark.parametrize(
    ("length", "key", "status"), [(14, b"secret-1", 200), (14, b"wrong", 401), (2**30, b"secret-1", 413)]
)
async def test_a_body_is_asked_for_once_it_is_wanted(serve, length, key, status):
    """A client that waits with its body is told at once that it is refused, and need not send it."""
    served = await serve(api_key=("secret-1",))
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    expects = b"Authorization: Bearer %b\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (key, length)
    writer.write(POST + expects)

    head = await reader.readuntil(b"\r\n\r\n")
    if status == 200:
        assert head == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt":"x"}')
        head = await reader.readuntil(b"\r\n\r\n")

    assert int(head.split()[1]) == status
    assert (b"Connection: close" in head) == (status != 200), "a next request would be taken for the body"
    writer.close()


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_head_that_does_not_end(serve, monkeypatch, before):
    """The connection is closed, also if it is not its first request."""
    monkeypatch.setattr("pagebus.web.http.connection.HEAD_TIMEOUT_S", 0.05)
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    if before:
        writer.write(before)
        await reader.readuntil(b"}")

    writer.write(POST + b"X: ")

    assert await reader.read() == b""
    writer.close()


async def test_a_head_in_pieces(serve, monkeypatch):
    """A head that comes in pieces, in time, is a head; its deadline does not outlive it."""
    served = await serve()
    loop = asyncio.get_running_loop()
    deadlines = []
    call_later = loop.call_later

    def spy(delay_s, callback, *args):
        handle = call_later(delay_s, callback, *args)
        if getattr(callback, "__name__", "") == "force_close":
            deadlines.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", spy)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHo")
    await until(lambda: bool(deadlines))
    writer.write(b"st: x\r\nConnection: close\r\n\r\n")

    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert [handle.cancelled() for handle in deadlines] == [True]
    writer.close()


@pytest.mark.parametrize(
    ("address", "counted"),
    [("10.1.2.3", "10.1.2.3"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("fe80::1%lo", "fe80::/64"),
     ("::1", "::/64"), ("::ffff:10.1.2.3", "::ffff:10.1.2.3")],
)  # fmt: skip
def test_who_has_many_addresses_counts_once(address, counted):
    """A network of IPv6 is one client, however many of its addresses it uses."""
    assert network_of(address) == counted


async def test_connections_of_one_address(serve):
    """One too many is a 429; when others are closed there is room again."""
    served = await serve(max_connections_per_address=2)
    open_ones = [await asyncio.open_connection("127.0.0.1", served.actor.port) for _ in range(2)]
    get = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for reader, writer in open_ones:
        writer.write(get.replace(b"Connection: close\r\n", b""))
        await reader.readuntil(b"}")

    status, body, head = await exchange(served, b"")
    assert (status, body["error"]["reason"]) == (429, "too_many_requests")
    assert b"Retry-After: 1" in head

    for _, writer in open_ones:
        writer.close()
    await until(lambda: not served.actor.connections.of_address)
    assert (await exchange(served, get))[0] == 200


async def test_silent_clients_are_probed(serve):
    """What is accepted has the options with which a client that is cut off is noticed."""
    served = await serve()
    (listening,) = (sock for server in served.actor._listening for sock in server.sockets)

    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
