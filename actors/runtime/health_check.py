"""Health checks for containers and the supervisor: a tiny HTTP GET."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus, BusError

UNIX = "unix:"
PROBE_TIMEOUT_S = 4.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable_host(host: str) -> str:
    """The address by which this machine reaches a server that listens on ``host``."""
    return ANY_ADDRESS.get(host, host)


def is_socket(host: str) -> bool:
    """Whether ``host`` is the path of a Unix socket (``unix:/run/pagebus.sock``)."""
    return host.startswith(UNIX)


def address_of(settings: Settings) -> tuple[str, int]:
    """Host and port of an ingress with these settings; the port of a Unix socket is 0."""
    return (settings.host, settings.port) if settings.uds is None else (UNIX + settings.uds, 0)


def url_of(host: str, port: int) -> str:
    """``http://host:port``, with brackets around an IPv6 address."""
    shown = reachable_host(host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


async def http_status(host: str, port: int, path: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """Status of ``GET path``, or None if no HTTP server answers within ``timeout_s``."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            if is_socket(host):
                reader, writer = await asyncio.open_unix_connection(host.removeprefix(UNIX))
            else:
                reader, writer = await asyncio.open_connection(reachable_host(host), port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            line = await reader.readline()
        version, status = line.split(None, 2)[:2]
        return int(status) if version.startswith(b"HTTP/") else None
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def is_ready(info: Mapping[str, Any]) -> bool:
    """Whether an actor with this lease info accepts work. A draining actor still does its work and counts as ready."""
    return info.get("state") in ("ready", "draining") and not is_stalled(info)


def is_stalled(info: Mapping[str, Any]) -> bool:
    """Whether an executor with this lease info has steps to compute and does not advance."""
    return bool(info.get("stalled_s"))


async def healthy(kind: str, settings: Settings, bus: Bus | None, *, here: bool = False) -> bool:
    """Whether an actor of this kind is ready: an ingress that answers ``/health`` with 200, or a lease that is ready.

    ``here``: only actors on this host count (each container of a scaled service checks its own).
    """
    if kind == "ingress":
        return await http_status(*address_of(settings), "/health") == 200
    assert bus is not None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await bus.connect()
            leases = await bus.leases(kind)
    except (BusError, TimeoutError):
        return False
    finally:
        with contextlib.suppress(BusError):
            await bus.close()
    mine = [lease for lease in leases if not here or lease.info.get("host") == socket.gethostname()]
    named = [lease for lease in mine if settings.actor_name in (None, lease.name, lease.info.get("actor"))]
    return any(is_ready(lease.info) for lease in named)
