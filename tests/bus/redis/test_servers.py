"""Ways to reach Redis other than a plain socket: TCP, TLS with passwords, Sentinel with a failover."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pagebus.bus.contract import BusError, BusUnavailable
from pagebus.bus.messages import AbortRequest
from pagebus.bus.private_redis.server import find_redis_server
from pagebus.bus.redis import url as url_module
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import RedisLink, UrlRefused
from pagebus.bus.redis.tls import check_tls_files
from pagebus.bus.redis.url import parse_redis_url, with_tls_files
from tests.helpers.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")
Launch = Callable[..., Awaitable[None]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Starts redis-server programs; they end with the test."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str) -> None:
        program = find_redis_server()
        assert program is not None
        started.append(
            await asyncio.create_subprocess_exec(
                program, *arguments, cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
        )

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def command(port: int, *words: str) -> object:
    link = RedisLink(parse_redis_url(f"redis://127.0.0.1:{port}"), "test")
    try:
        return (await link.call(words))[0]
    finally:
        await link.close()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """What TLS options of a redis-server and of a client name: a key, and a certificate that vouches for itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"key": key, "cert": certificate, "ca": certificate}


def tls_options(port: int, certificates: dict[str, str]) -> list[str]:
    files = [("--tls-cert-file", "cert"), ("--tls-key-file", "key"), ("--tls-ca-cert-file", "ca")]
    return [
        "--port",
        "0",
        "--tls-port",
        str(port),
        *(word for flag, name in files for word in (flag, certificates[name])),
    ]


async def test_tls_with_user_and_password(launch: Launch, certificates: dict[str, str]) -> None:
    """rediss:// checks the server's certificate; an unknown one is refused."""
    port = free_port()
    await launch(*tls_options(port, certificates), "--tls-auth-clients", "no", "--requirepass", "p w")
    url = f"rediss://:p%20w@localhost:{port}"
    bus = RedisBus(with_tls_files(url, ca=certificates["ca"]), connect_timeout_s=LIMIT_S)
    await bus.connect()
    await bus.publish([("s", AbortRequest(request_id="r"))])
    assert await bus.length("s") == 1
    await bus.close()
    stranger = RedisBus(url, connect_timeout_s=LIMIT_S)
    with pytest.raises(UrlRefused, match=r"not trusted here: is --redis-ca-file .*CERTIFICATE_VERIFY_FAILED"):
        await stranger.connect()
    await stranger.close()


async def test_tls_with_certificates_of_clients(launch: Launch, certificates: dict[str, str]) -> None:
    """A server that asks its clients for certificates lets those in who have one, without a password."""
    port = free_port()
    await launch(*tls_options(port, certificates), "--tls-auth-clients", "yes")
    url = f"rediss://localhost:{port}"
    bus = RedisBus(with_tls_files(url, **certificates), connect_timeout_s=LIMIT_S)
    await bus.connect()
    assert await bus.length("s") == 0
    await bus.close()
    stranger = RedisBus(with_tls_files(url, ca=certificates["ca"]), connect_timeout_s=LIMIT_S)
    with pytest.raises(UrlRefused, match="wants a client certificate: give --redis-cert-file"):
        await stranger.connect()
    await stranger.close()


@pytest.mark.parametrize("of_clients", ["no", "yes"])
async def test_a_port_that_speaks_tls_says_so(launch: Launch, certificates: dict[str, str], of_clients: str) -> None:
    """To a URL without TLS, which gets no reply but the end of its connection."""
    port = free_port()
    versions = ["--tls-protocols", "TLSv1.2"]  # in which a client without a certificate does not get as far
    await launch(*tls_options(port, certificates), "--tls-auth-clients", of_clients, *versions)
    bus = RedisBus(f"redis://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
    with pytest.raises(UrlRefused, match=rf"redis://127.0.0.1:{port} speaks TLS: write rediss:// for redis://"):
        await bus.connect()
    await bus.close()


async def test_a_port_that_does_not_speak_tls_says_so(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a URL with TLS, whose greeting Redis takes for the beginning of a command that it waits for."""
    monkeypatch.setitem(url_module._CONNECTION_OPTIONS, "socket_connect_timeout", 0.5)
    port = free_port()
    await launch("--port", str(port))
    bus = RedisBus(f"rediss://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
    with pytest.raises(UrlRefused, match="does not speak TLS: write redis:// for rediss://"):
        await bus.connect()
    await bus.close()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"ca": "gone.pem"}, "--redis-ca-file gone.pem cannot be used: No such file or directory"),
        ({"ca": "key"}, r"--redis-ca-file \S+key.pem cannot be used: no certificate or crl found"),
        ({"cert": "cert"}, r"--redis-cert-file \S+cert.pem without a key file cannot be used: not in PEM format"),
        ({"cert": "cert", "key": "other"}, r"with --redis-key-file \S+other.pem cannot be used: key values mismatch"),
        ({"key": "key"}, "--redis-key-file needs --redis-cert-file"),
    ],
)
def test_tls_files_that_cannot_be_used(certificates: dict[str, str], files: dict[str, str], told: str) -> None:
    """The file at fault is named, before a server is asked; a good set passes."""
    other = Path(certificates["key"]).with_name("other.pem")
    subprocess.run(["openssl", "genrsa", "-out", str(other), "2048"], check=True, capture_output=True)
    known = certificates | {"other": str(other)}
    url = with_tls_files("rediss://h", **{name: known.get(file, file) for name, file in files.items()})
    with pytest.raises(BusError, match=told):
        check_tls_files(parse_redis_url(url).options)
    check_tls_files(parse_redis_url(with_tls_files("rediss://h", **certificates)).options)


async def test_waiting_for_a_server_is_told_twice(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """Once that it is waited for, however many tries it takes, and once that it is there."""
    port = free_port()
    bus = RedisBus(f"redis://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
    connecting = asyncio.create_task(bus.connect())
    await until(lambda: bool(caplog.records))
    await launch("--port", str(port), "--save", "")
    await connecting
    await bus.close()
    told = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert told == [f"waiting up to {LIMIT_S:g} s for the bus", f"the bus at redis://127.0.0.1:{port} answers now"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"],
            r"may evict our keys \(maxmemory-policy allkeys-lru",
        ),
        (["--maxmemory", "1gb", "--maxmemory-policy", "noeviction"], "^$"),
        (["--maxmemory-policy", "allkeys-lru"], "^$"),
    ],
)
async def test_a_server_that_may_evict_is_known(
    launch: Launch, caplog: pytest.LogCaptureFixture, options: list[str], advice: str
) -> None:
    """To who asks the bus; each connection would repeat it."""
    port = free_port()
    await launch("--port", str(port), *options)
    bus = RedisBus(f"redis://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
    await bus.connect()
    await bus.close()
    assert re.search(advice, bus.advice)
    assert not [record for record in caplog.records if "evict" in record.getMessage()]


def test_options_behind_sentinels_are_what_was_given() -> None:
    """Also where they hold what has a meaning in URLs."""
    url = with_tls_files("rediss+sentinel://h/main?ssl_password=a%26b%2Bc", ca="/my certs+x&y/ca.pem")
    options = parse_redis_url(url).options
    assert (options["ssl_password"], options["ssl_ca_certs"]) == ("a&b+c", "/my certs+x&y/ca.pem")


async def test_sentinel_names_the_master_and_follows_a_failover(launch: Launch, tmp_path: Path) -> None:
    """The bus finds the master through Sentinel, and the new master after a failover."""
    first, second, sentinel = free_port(), free_port(), free_port()
    await launch("--port", str(first), "--save", "")
    await launch("--port", str(second), "--save", "", "--replicaof", f"127.0.0.1 {first}")
    for port in (first, second):
        bus = RedisBus(f"redis://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
        await bus.connect()
        await bus.close()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {sentinel}\nsentinel monitor main 127.0.0.1 {first} 1\n")
    await launch(str(config), "--sentinel")

    bus = RedisBus(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/main", connect_timeout_s=LIMIT_S)
    await bus.connect()
    await bus.publish([("s", AbortRequest(request_id="r"))])
    assert await command(first, "XLEN", "s") == 1

    # What Sentinel does in a failover, without its waiting: promote one, demote the other, tell clients.
    await command(second, "REPLICAOF", "NO", "ONE")
    await command(first, "REPLICAOF", "127.0.0.1", str(second))
    await command(sentinel, "SENTINEL", "REMOVE", "main")
    with pytest.raises(BusUnavailable, match=r"READONLY|replica|failover|no connection"):
        await bus.publish([("s", AbortRequest(request_id="r"))])
    with pytest.raises(BusUnavailable, match="no Redis master"):
        await bus.ping()
    await command(sentinel, "SENTINEL", "MONITOR", "main", "127.0.0.1", str(second), "1")
    await bus.connect()
    await bus.publish([("t", AbortRequest(request_id="r"))])
    assert await command(second, "XLEN", "t") == 1
    await bus.close()


async def test_what_is_stored_is_on_the_replica(launch: Launch) -> None:
    """With ``?replicas=1`` a write is stored once the replica has it; while there is none, nothing is stored."""
    first, second = free_port(), free_port()
    await launch("--port", str(first), "--save", "")
    await launch("--port", str(second), "--save", "", "--replicaof", f"127.0.0.1 {first}", "--repl-diskless-sync", "no")
    for port in (first, second):
        one = RedisBus(f"redis://127.0.0.1:{port}", connect_timeout_s=LIMIT_S)
        await one.connect()
        await one.close()
    bus = RedisBus(f"redis://127.0.0.1:{first}?replicas=1", connect_timeout_s=LIMIT_S)
    await bus.connect()
    for number in range(20):
        await bus.publish([("s", AbortRequest(request_id="r"))])
        assert await command(second, "XLEN", "s") == number + 1
    epoch = await bus.acquire_lease("k", "n", {}, ttl_s=100)
    assert await command(second, "GET", bus.names.epochs) == str(epoch).encode()
    await command(second, "REPLICAOF", "NO", "ONE")
    with pytest.raises(BusUnavailable, match="reached 0 of 1 replicas"):
        await bus.publish([("s", AbortRequest(request_id="r"))])
    await bus.close()
    with pytest.raises(BusError, match="must be a number"):
        RedisBus("redis://127.0.0.1?replicas=all")
