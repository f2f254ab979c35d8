"""Redis URLs, and opening a connection to the server they name.

==========================================================  =======================================================
``redis://[user:password@]host:port[/db]``                  TCP
``rediss://...``                                            TCP with TLS (``?ssl_ca_certs=FILE``, ``?ssl_certfile=``...)
``unix://[user:password@]/path/to.sock[?db=0]``             Unix socket
``redis+sentinel://[user:password@]h1:p1,h2/service[/db]``  the master of ``service``, asked of the Sentinels;
``rediss+sentinel://...``                                   with ``?sentinel_username=``, ``?sentinel_password=``
==========================================================  =======================================================

``?replicas=1`` (2, ...) with any of them: a write counts as stored once it is on so many replicas. With as many as
there are, a failover loses nothing that was stored; while one of them is away, nothing is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, ResponseError

from pagebus.bus.contract import BusError, BusUnavailable
from pagebus.bus.redis.url_check import HINT, url_problem

CONNECT_TIMEOUT_S = 5.0
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
SCHEMES = ("redis", "rediss", "unix", *_SENTINEL_SCHEMES)
_SENTINEL_PORT = 26379

# Protocol 2 is pinned so that reply shapes never depend on a default; one reader of them is enough (replies.py).
# Timeouts are ours (link.py). No retry: a write that timed out may have been applied.
_CONNECTION_OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "socket_timeout": None,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "driver_info": None,
}


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A parsed URL. ``text`` names the server without its credentials, for messages to people."""

    text: str
    connection_class: type[AbstractConnection]
    options: Mapping[str, Any] = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    replicas: int = 0

    async def open(self, client_name: str) -> asyncio.StreamWriter:
        """Connect, authenticate and select the database; returns the connection for somebody else to read.

        Raises:
            RedisError, OSError: the server does not answer or refuses us.
            BusUnavailable: the Sentinels name no usable master.
        """
        options = dict(self.options)
        if self.sentinels:
            options["host"], options["port"] = await self._find_master()
        connection = self.connection_class(client_name=client_name, **_CONNECTION_OPTIONS, **options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            if self.sentinels:
                await self._check_master(connection)
            writer = connection._writer
            if writer is None:
                raise ConnectionError("the connection was lost at once")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        connection._reader = connection._writer = None  # it has nothing more to do with them
        return writer

    async def _find_master(self) -> tuple[str, int]:
        sentinel = Sentinel(list(self.sentinels), sentinel_kwargs=self._sentinel_client_options())  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self.service)
        except RedisError as error:
            raise BusUnavailable(f"no Redis master from {self.text}: {error}") from error
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return str(host), int(port)

    def _sentinel_client_options(self) -> dict[str, Any]:
        # No retry: a Sentinel that is down is passed over for the next one.
        timeouts = {"socket_timeout": CONNECT_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        return {"protocol": 2, "retry": Retry(NoBackoff(), 0), **timeouts, **self.sentinel_options}

    async def _check_master(self, connection: AbstractConnection) -> None:
        await connection.send_command("ROLE", check_health=False)
        try:
            role = await connection.read_response(timeout=CONNECT_TIMEOUT_S)
        except ResponseError as error:
            raise BusUnavailable(f"{self.text}: the master does not tell its role: {error}") from error
        if not role or role[0] not in (b"master", "master"):
            raise BusUnavailable(f"{self.text}: a failover is under way, the server named master is not one")


def with_tls_files(url: str, *, ca: str | None = None, cert: str | None = None, key: str | None = None) -> str:
    """The URL with TLS files added; those that it names already stay.

    Raises:
        BusError: files are named for a connection without TLS.
    """
    given = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    files = {name: value for name, value in given.items() if value is not None}
    if not files:
        return url
    parts = urlsplit(url)
    if not parts.scheme.startswith("rediss"):
        raise BusError(f"certificates are for rediss://, and the bus URL is {parts.scheme}://")
    query = urlencode(files | dict(parse_qsl(parts.query)), safe="/")
    return urlunsplit(parts._replace(query=query))


def with_password(url: str, password: str | None) -> str:
    """The URL with a password, percent-encoded; a password in the URL stays."""
    parts = urlsplit(url)
    if password is None or parts.password is not None or parts.scheme not in SCHEMES:
        return url
    user, _, hosts = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{hosts}"))


def is_open(target: RedisTarget) -> bool:
    """Whether the URL names a server on another machine and neither a password nor a client certificate."""
    hosts = [host for host, _ in target.sentinels] or [str(target.options.get("host", "localhost"))]
    remote = "path" not in target.options and not all(map(_is_local, hosts))
    return remote and not (target.options.get("password") or target.options.get("ssl_certfile"))


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def parse_redis_url(url: str) -> RedisTarget:
    """The target of a URL.

    Raises:
        BusError: it cannot be understood; the text does not repeat its password.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise BusError(f"unknown bus URL scheme {scheme!r:.40}: use one of {', '.join(SCHEMES)}")
    problem = url_problem(url)
    if problem is not None:
        raise BusError(problem)
    try:
        if scheme in _SENTINEL_SCHEMES:
            return _parse_sentinel_url(url)
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError:
        raise BusError(f"cannot understand the bus URL ({scheme}://...): is a port no number? {HINT}") from None
    connection_class = options.pop("connection_class", Connection)
    replicas = _replicas(options.pop("replicas", "0"))
    if scheme == "unix":
        text = f"unix://{options.get('path', '')}"
        if not options.get("path"):
            raise BusError("the bus URL unix:// needs the path of the socket: unix:///run/redis.sock")
    else:
        text = f"{scheme}://{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return RedisTarget(text, connection_class, _checked(connection_class, options), replicas=replicas)


def _replicas(text: str) -> int:
    if not text.isdecimal():
        raise BusError(f"the bus URL has replicas={text!r:.20}: it must be a number")
    return int(text)


def _checked(connection_class: type[AbstractConnection], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the URL without those we set ourselves; an unknown one is found now, not when connecting."""
    kept = {name: value for name, value in options.items() if name not in _CONNECTION_OPTIONS}
    try:
        connection_class(**kept)
    except (TypeError, ValueError, RedisError) as error:
        raise BusError(f"the bus URL has an option that does not fit: {error}") from None
    return kept


def _parse_sentinel_url(url: str) -> RedisTarget:
    parts = urlsplit(url)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    if not hosts or not path:
        raise BusError(
            f"the bus URL {parts.scheme}:// needs Sentinels and a service: {parts.scheme}://h1:26379,h2/main"
        )
    query = dict(parse_qsl(parts.query))
    sentinel_options: dict[str, Any] = {
        name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query
    }
    replicas = _replicas(query.pop("replicas", "0"))
    tls = parts.scheme.startswith("rediss")
    host_url = f"{'rediss' if tls else 'redis'}://master/{path[1] if len(path) > 1 else 0}"
    rest = urlencode(query, safe="/")
    options: dict[str, Any] = dict(parse_url(f"{host_url}?{rest}" if rest else host_url))
    options.pop("host", None)
    connection_class = options.pop("connection_class", SSLConnection if tls else Connection)
    username, _, password = userinfo.partition(":")
    if username:
        options["username"] = unquote(username)
    if password:
        options["password"] = unquote(password)
    if tls:
        sentinel_options |= {"ssl": True} | {k: v for k, v in options.items() if k.startswith("ssl_")}
    text = f"{parts.scheme}://{hosts}/{path[0]}"
    sentinels = tuple(map(_parse_host, hosts.split(",")))
    options = _checked(connection_class, options)
    return RedisTarget(text, connection_class, options, sentinels, path[0], sentinel_options, replicas)


def _parse_host(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), _SENTINEL_PORT
    if not port.isdigit():
        raise ValueError(f"port {port!r:.20} of Sentinel {host!r:.80} is not a number")
    return host.strip("[]"), int(port)
