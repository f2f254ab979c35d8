"""One actor as a process: names, signals, exit codes, and the health check."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from pathlib import Path

import pytest

from pagebus.actors.commands.cli import main
from pagebus.actors.model.config import ModelError
from pagebus.actors.runtime.gc_tuning import START_THRESHOLD, USUAL_THRESHOLDS, collect_seldom, keep_what_is_there
from pagebus.actors.runtime.health_check import healthy, http_status, reachable_host, url_of
from pagebus.actors.runtime.process import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    cause_of,
    choose_gpu,
    default_name,
    exit_code,
    make_bus,
    stop_on_signals,
    unless_stopped,
)
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.telemetry import logs
from pagebus.bus.contract import BusUnavailable, Fenced
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.redis.url import is_open, parse_redis_url, with_tls_files


def test_default_name_is_valid_and_unique() -> None:
    """It passes the check of --actor-name and holds the process id."""
    name = default_name("executor")
    assert Settings(actor_name=name).actor_name == name
    assert name.startswith("executor-")
    assert name.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (SettingsError("--port 1: taken"), EXIT_UNUSABLE, "--port 1: taken"),
        (ModelError("no such model"), EXIT_UNUSABLE, "no such model"),
        (ModuleNotFoundError("torch"), EXIT_UNUSABLE, "torch"),
        (Fenced("replaced"), EXIT_FAILED, "replaced"),
        (BusUnavailable("gone"), EXIT_FAILED, "gone"),
        (RuntimeError("bug"), EXIT_FAILED, "RuntimeError: bug"),
    ],
)
def test_exit_codes(error: Exception, code: int, cause: str) -> None:
    """2 means that a restart is useless, 1 that it may help. What was written for people is told as it is."""
    assert exit_code(error, logs.get_logger()) == code
    assert cause_of(error) == cause


def test_an_actor_ends_with_a_sentence(capfd: pytest.CaptureFixture[str], redis_url: str) -> None:
    """Behind the lines of the log, and on one line, whatever the error says."""
    name = f"pagebus-{os.urandom(4).hex()}"
    assert main(["actor", "detokenizer", "/no/such/\nmodel", "--bus", redis_url, "--name", name]) == EXIT_UNUSABLE
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines[:-1]] == ["stopped", "cannot start"]
    assert lines[-1] == "pagebus: model '/no/such/\\nmodel': there is no such folder"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_drains_second_ends(number: signal.Signals) -> None:
    """The first calls what was registered, before or after; the second what is then to be done."""
    called: list[str] = []
    with stop_on_signals() as stop:
        stop.when_repeated(lambda: called.append("again"))
        stop.then(lambda: called.append("first"))
        os.kill(os.getpid(), number)
        await stop.event.wait()
        stop.then(lambda: called.append("late"))
        stop()
    assert called == ["first", "late", "again"]


async def test_signal_interrupts_connecting() -> None:
    """A process told to stop while it waits for the bus stops."""
    with stop_on_signals() as stop:
        waiting = asyncio.create_task(unless_stopped(stop, _forever()))
        await asyncio.sleep(0)
        stop()
        assert await waiting is False


async def test_errors_of_connecting_are_raised() -> None:
    """What fails while no signal comes is an error."""

    async def fail() -> None:
        raise BusUnavailable("gone")

    with stop_on_signals() as stop, pytest.raises(BusUnavailable):
        await unless_stopped(stop, fail())


async def _forever() -> None:
    await asyncio.Event().wait()


def test_bad_bus_url_names_the_flag() -> None:
    """The bus's own complaint is told as one about --bus."""
    with pytest.raises(SettingsError, match="--bus"):
        make_bus(Settings(bus="redis://host:notaport"))


def test_gpu_is_chosen_by_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    """With --gpu-lock-dir the process sees one free GPU only; a second executor here finds none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "before")
    monkeypatch.setattr("pagebus.actors.runtime.process.list_gpus", lambda uuids: ["GPU-x"])
    settings = Settings(gpu_lock_dir=str(tmp_path))
    choose_gpu(settings)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    with pytest.raises(RuntimeError, match="all 1 GPUs"):
        choose_gpu(settings)
    choose_gpu(settings.replace(device="cpu"))
    for ranks in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(SettingsError, match="ranks that are started one by one"):
            choose_gpu(settings.replace(**{ranks: 2}))


def test_addresses() -> None:
    """Listening everywhere means that here it is reached on the loopback."""
    assert reachable_host("0.0.0.0") == "127.0.0.1"
    assert url_of("::", 80) == "http://[::1]:80"
    assert url_of("example.org", 80) == "http://example.org:80"


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", 200), (b"HTTP/1.0 503 no\r\n\r\n", 503), (b"hello\r\n", None), (b"", None)],
)
async def test_http_status(answer: bytes, status: int | None) -> None:
    """The status of an HTTP answer; anything else is no answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await http_status("127.0.0.1", port, "/health") == status
    server.close()
    await server.wait_closed()
    assert await http_status("127.0.0.1", port, "/health") is None


@pytest.mark.parametrize(
    ("info", "here", "name", "well"),
    [
        ({"state": "ready"}, False, None, True),
        ({"state": "draining"}, False, None, True),
        ({"state": "loading"}, False, None, False),
        ({"state": "ready", "host": "elsewhere"}, True, None, False),
        ({"state": "ready"}, False, "executor-1", True),
        ({"state": "ready"}, False, "executor-2", False),
    ],
)
async def test_healthcheck_by_lease(info: dict[str, str], here: bool, name: str | None, well: bool) -> None:
    """An actor is well if its lease says so; --here and --actor-name narrow the choice."""
    server = MemoryServer()
    await MemoryBus(server).acquire_lease("executor", "executor-1", info, ttl_s=60)
    assert await healthy("executor", Settings(actor_name=name), MemoryBus(server), here=here) is well


async def test_no_lease_no_health() -> None:
    """Other kinds do not count."""
    server = MemoryServer()
    await MemoryBus(server).acquire_lease("executor", "executor-1", {"state": "ready"}, ttl_s=60)
    assert await healthy("tokenizer", Settings(), MemoryBus(server)) is False


def test_garbage_is_collected_as_usual_once_an_actor_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom until then; and what was made until then is never looked at again."""
    frozen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.get_threshold()))
    collect_seldom()
    try:
        keep_what_is_there()
        assert (frozen[0][0], gc.get_threshold()) == (START_THRESHOLD, USUAL_THRESHOLDS)
    finally:
        gc.set_threshold(*USUAL_THRESHOLDS)


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("redis://10.0.0.7", True), ("redis://redis:6379/0", True), ("redis+sentinel://localhost,h2/main", True),
        ("rediss://h", True), ("redis://:p@h", False), ("redis://u:p@[fe80::1]", False), ("redis://[::1]:1", False),
        ("redis://127.0.0.2", False), ("redis://localhost", False), ("unix:///run/r.sock", False),
        ("redis+sentinel://127.0.0.1,localhost:5/main", False), ("memory://", False),
    ],
)  # fmt: skip
def test_an_open_redis_on_another_machine_is_refused(url: str, refused: bool) -> None:
    """Unless the operator takes that upon himself; the text says what to do."""
    if refused:
        with pytest.raises(SettingsError, match=r"no password.*--allow-open-redis"):
            make_bus(Settings(bus=url))
    make_bus(Settings(bus=url, allow_open_redis=refused))


def test_certificates_are_for_tls(tmp_path: Path) -> None:
    """A client certificate stands for a password; without TLS, files are a mistake."""
    with pytest.raises(SettingsError, match="certificates are for rediss://"):
        make_bus(Settings(bus="redis://:p@h", redis_ca_file="ca.pem"))
    with pytest.raises(SettingsError, match=r"^--bus: --redis-ca-file gone.pem cannot be used: No such file"):
        make_bus(Settings(bus="rediss://:p@h", redis_ca_file="gone.pem"))
    url = with_tls_files("rediss://h:1/2?ssl_ca_certs=mine.pem", ca="ca.pem", cert="/a/c.pem", key="k.pem")
    assert url == "rediss://h:1/2?ssl_ca_certs=mine.pem&ssl_certfile=/a/c.pem&ssl_keyfile=k.pem"
    assert not is_open(parse_redis_url(url))
