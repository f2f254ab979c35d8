"""Listening sockets with their options, which accepted connections inherit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat

from pagebus.actors.settings import SettingsError
from pagebus.web.http.limits import SEND_BUFFER_BYTES, WRITE_TIMEOUT_S

BACKLOG = 2048
OPEN_FILES, FEW_OPEN_FILES = 65_536, 4096
"""How many files an ingress asks to open, one for every connection; and the most that are worth a warning."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 15, 5
"""When a silent client is probed. One that is cut off from the network is noticed after ``WRITE_TIMEOUT_S``, whether
something is written to it or not."""


def allow_open_files() -> int:
    """Raise the limit of open files as far as it is needed and permitted; returns it.

    The usual soft limit, 1024, is for programs that use ``select``. Beyond the limit, connections are reset and nothing
    says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [OPEN_FILES if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)]
    if limits[0] < (wanted := min(OPEN_FILES, limits[1])):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return limits[0]


async def listen(host: str, port: int, *, share: bool = False) -> list[socket.socket]:
    """Bind every address of ``host``; port 0 takes one free port for all of them. ``share`` lets others share the port.

    Raises:
        SettingsError: an address cannot be had; the text says why.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SettingsError(f"--host {host!r}: {error.strerror or error}") from error
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            sockets.append(_bind(family, (address[0], port, *address[2:]), share=share))
            port = sockets[-1].getsockname()[1]
    except OSError as error:
        for bound in sockets:
            bound.close()
        why, other = error.strerror or error, "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise SettingsError(f"cannot listen on {host}:{port}: {why}; give another {other}") from error
    return sockets


def listen_on_path(path: str) -> list[socket.socket]:
    """Bind a Unix socket; one that was left there, and to which nobody listens, goes.

    Raises:
        SettingsError: it cannot be had; the text says why.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            if is_listened_to(path):
                raise OSError(errno.EADDRINUSE, "another process listens there; end it, or give another path")
            os.unlink(path)
        sock.bind(path)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise SettingsError(f"--uds {path}: {error.strerror or error}") from error
    return [sock]


def is_listened_to(path: str) -> bool:
    """Whether a process answers at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except BlockingIOError:  # one that accepts no more just now
            return True
        except OSError:
            return False
        return True


def remove_path(path: str) -> None:
    """The socket there is not listened on any more."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _bind(family: int, address: tuple[object, ...], *, share: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_TIMEOUT_S * 1000))
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
