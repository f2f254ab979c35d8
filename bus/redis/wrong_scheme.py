"""A port that speaks TLS reached without it, or the reverse: neither side's error says so, so the server is asked."""

from __future__ import annotations

import asyncio
import ssl

from redis.asyncio.connection import SSLConnection

from pagebus.bus.redis.url import RedisTarget

ASKING_TIMEOUT_S = 2.0


async def scheme_problem(target: RedisTarget) -> str | None:
    """What to write in place of the URL's scheme if a server that does not understand us speaks the other form; else
    None. Nothing secret is sent. Sentinels and sockets are not asked."""
    if target.sentinels or "path" in target.options:
        return None
    address = target.options.get("host", "localhost"), target.options.get("port", 6379)
    has_tls = issubclass(target.connection_class, SSLConnection)
    try:
        async with asyncio.timeout(ASKING_TIMEOUT_S):
            is_other = await (_speaks_plainly(*address) if has_tls else _speaks_tls(*address))
    except OSError:
        return None
    if not is_other:
        return None
    return "does not speak TLS: write redis:// for rediss://" if has_tls else "speaks TLS: write rediss:// for redis://"


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # any certificate is an answer
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # said in TLS, as to a client that has no certificate
    writer.transport.abort()
    return True


async def _speaks_plainly(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"PING\r\n")
        return await reader.read(1) in (b"+", b"-")
    finally:
        writer.transport.abort()
