"""Hosts on one machine: network namespaces whose links to a switch have a rate, and a Redis beside the switch.

A namespace has no name. It lives as long as its processes, which die with the one that made them, so nothing stays
behind. Needs Linux, root, and ``unshare``, ``nsenter``, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagebus.actors.runtime.child import die_with_parent
from pagebus.bus.private_redis.server import find_redis_server
from tests.helpers.waiting import LIMIT_S

PROGRAMS = ("unshare", "nsenter", "ip", "tc")
SWITCH, PORT = "198.18.0.1", 6379
"""Addresses of this range are for tests of networks (RFC 2544)."""
QUEUE_MS = 20
"""Longest time that bytes wait before a link."""
LEAST_BURST, BURST_S = 64 << 10, 0.002
"""Bytes, and the time in which more may pass at once: the kernel looks at a link a few hundred times a second."""


def why_not() -> str | None:
    """Why there can be no such hosts here; None: there can."""
    if missing := [each for each in PROGRAMS if shutil.which(each) is None]:
        return f"{', '.join(missing)}: not on PATH"
    if find_redis_server() is None:
        return "no redis-server on PATH"
    if os.geteuid():
        return "only root may make network namespaces"
    try:
        with NetworkHosts(1) as hosts:
            hosts.limit(1000.0)
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        return f"the system makes no network namespaces: {error}{_said(error)}"
    return None


class NetworkHosts:
    """``count`` hosts and a switch, each a network namespace. A context."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open = contextlib.ExitStack()
        self._switch: Host | None = None
        self.hosts: list[Host] = []

    def __enter__(self) -> NetworkHosts:
        try:
            self._switch = self._open.enter_context(_namespace())
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "address", "add", f"{SWITCH}/24", "dev", "switch")
            self._switch.run("ip", "link", "set", "dev", "switch", "up")
            for number in range(self._count):
                self._add(self._switch, number)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def limit(self, megabits_per_s: float) -> None:
        """Let each host send and receive at most so much."""
        assert self._switch is not None
        for number, host in enumerate(self.hosts):
            for place, device in ((host, "eth0"), (self._switch, f"port{number}")):
                place.run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *_bucket(megabits_per_s))

    @contextlib.contextmanager
    def redis(self, folder: Path) -> Iterator[tuple[str, str]]:
        """A Redis: its URL for this process, and that for processes on the hosts."""
        assert self._switch is not None
        socket, program = folder / "redis.sock", find_redis_server()
        assert program is not None
        options = ("--bind", SWITCH, "--port", str(PORT), "--protected-mode", "no", "--save", "", "--dir", str(folder))
        with self._switch.running(program, *options, "--unixsocket", str(socket)) as process:
            _until(socket.exists, process, "redis-server")
            yield f"unix://{socket}", f"redis://{SWITCH}:{PORT}"

    def _add(self, switch: Host, number: int) -> None:
        host, port = self._open.enter_context(_namespace()), f"port{number}"
        peer = ("peer", "name", port, "netns", str(switch.pid))
        host.run("ip", "link", "add", "eth0", "type", "veth", *peer)
        host.run("ip", "address", "add", f"198.18.0.{number + 2}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.run("ip", "link", "set", "dev", device, "up")
        switch.run("ip", "link", "set", "dev", port, "master", "switch", "up")
        self.hosts.append(host)


@dataclass(frozen=True, slots=True)
class Host:
    """The network namespace of process ``pid``."""

    pid: int

    def command(self, *command: str) -> tuple[str, ...]:
        """A command line that runs another one there."""
        return "nsenter", f"--net=/proc/{self.pid}/ns/net", *command

    def run(self, *command: str) -> str:
        """Run a command there; returns what it printed."""
        done = subprocess.run(self.command(*command), check=True, capture_output=True, text=True, timeout=LIMIT_S)
        return done.stdout

    def running(self, *command: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Keep a command running there for the length of a block."""
        return _process(self.command(*command))


@contextlib.contextmanager
def _namespace() -> Iterator[Host]:
    own = os.readlink("/proc/self/ns/net")
    with _process(("unshare", "--net", "sleep", "infinity")) as process:
        _until(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != own, process, "unshare")
        yield Host(process.pid)


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=die_with_parent(), start_new_session=True, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def _until(holds: object, process: subprocess.Popen[bytes], name: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    assert callable(holds)
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{name} did not start, or ended with {process.poll()}")
        time.sleep(0.01)


def _bucket(megabits_per_s: float) -> tuple[str, ...]:
    burst = max(LEAST_BURST, int(megabits_per_s * 1e6 / 8 * BURST_S))
    return "rate", f"{megabits_per_s * 1000:.0f}kbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"


def _said(error: BaseException) -> str:
    text = getattr(error, "stderr", None) or ""
    return f" ({text.strip()})" if text else ""
