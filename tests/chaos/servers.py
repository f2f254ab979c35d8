"""Redis servers of a deployment, and what can happen to them: killed, out of memory, disk full, failed over."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import redis

from pagebus.bus.private_redis.server import find_redis_server

START_S = 120.0
FAILOVER_AFTER_MS = 1000
"""How long a master is silent before Sentinel replaces it."""


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    FILE *file = fopen(getenv("CLOCK_OFFSET_FILE"), "r");
    long offset_s = 0;
    if (file && fscanf(file, "%ld", &offset_s) == 1) now->tv_sec += offset_s;
    if (file) fclose(file);
    return result;
}
"""
"""A wall clock, for LD_PRELOAD, that is as many seconds ahead as a file says."""


class Server:
    """One redis-server process."""

    def __init__(self, client: redis.Redis, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.client = client
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program = find_redis_server()
        assert program is not None, "these tests need a redis-server"
        self._process = subprocess.Popen(
            [program, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            restore_signals=False,  # SIGXFSZ stays ignored: a file that may not grow is an error, as on a full disk
        )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline_s, "redis-server does not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def fill_disk(self) -> None:
        """No file of the server may grow any more."""
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class OneServer:
    """A server on a Unix socket with an append-only file."""

    def __init__(self, fsync: str = "always", *, own_clock: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pagebus-chaos-", dir="/tmp"))
        path = self._folder / "redis.sock"
        self.url = f"unix://{path}"
        arguments = ("--port", "0", "--unixsocket", str(path), "--dir", str(self._folder))
        persistence = ("--save", "", "--appendonly", "yes", "--appendfsync", fsync)
        environment = self._make_clock() if own_clock else {}
        client = redis.Redis(unix_socket_path=str(path))
        self.server = Server(client, *arguments, *persistence, environment=environment)
        self.client = self.server.client

    def _make_clock(self) -> dict[str, str]:
        source, library = self._folder / "clock.c", self._folder / "clock.so"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        self.set_clock(0)
        return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._folder / "offset")}

    def set_clock(self, offset_s: int) -> None:
        """The clock of the server, made with ``own_clock``, is so far ahead."""
        new = self._folder / "offset.new"
        new.write_text(str(offset_s))
        new.replace(self._folder / "offset")

    def forget(self, num_bytes: int | None = None) -> None:
        """The server, which is not running, loses this much of the end of its file (None: everything)."""
        (file,) = (self._folder / "appendonlydir").glob("*.incr.aof")
        if num_bytes is None:
            shutil.rmtree(file.parent)
        else:
            os.truncate(file, file.stat().st_size - num_bytes)

    def destroy(self) -> None:
        self.server.kill()
        self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Replicated:
    """A master, a replica, and a Sentinel that replaces a master that is silent. Both have files: a server that came
    back empty could be made master, on a busy machine at once, and all would be lost."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pagebus-chaos-", dir="/tmp"))
        self._ports = [free_port(), free_port()]
        sentinel = free_port()
        first = self._ports[0]
        self.servers = [self._server(first), self._server(self._ports[1], "--replicaof", f"127.0.0.1 {first}")]
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {sentinel}\nsentinel monitor main 127.0.0.1 {first} 1\n"
            f"sentinel down-after-milliseconds main {FAILOVER_AFTER_MS}\nsentinel failover-timeout main 5000\n"
        )
        self._sentinel = Server(redis.Redis(port=sentinel), str(config), "--sentinel", "--dir", str(self._folder))
        self.url = f"redis+sentinel://127.0.0.1:{sentinel}/main?replicas=1"
        self.server = self.servers[0]
        self._until(self._in_sync)
        self._until(lambda: self._sentinel.client.sentinel_master("main")["num-slaves"] == 1)

    def _server(self, port: int, *arguments: str) -> Server:
        folder = self._folder / str(port)
        folder.mkdir()
        persistence = ("--save", "", "--appendonly", "yes", "--repl-diskless-sync-delay", "0")
        return Server(redis.Redis(port=port), "--port", str(port), "--dir", str(folder), *persistence, *arguments)

    @property
    def client(self) -> redis.Redis:
        """The master's, as Sentinel says."""
        _, port = self._sentinel.client.sentinel_get_master_addr_by_name("main")
        return self.servers[self._ports.index(int(port))].client

    def fail_over(self) -> float:
        """Kill the master; start it again as a replica once another is master, and wait until it has all that that one
        has: were the new master killed before, everything would be lost. Seconds without one."""
        port = int(self._sentinel.client.sentinel_get_master_addr_by_name("main")[1])
        old = self.servers[self._ports.index(port)]
        began_s = time.monotonic()
        old.kill()
        self._until(lambda: self.client is not old.client and self.client.info("replication")["role"] == "master")
        seconds = time.monotonic() - began_s
        old.start()
        self._until(self._in_sync)
        return seconds

    def _in_sync(self) -> bool:
        """Whether the other server has loaded all that the master has, and both say so."""
        master = self.client
        (replica,) = (server.client for server in self.servers if server.client is not master)
        told = master.info("replication").get("slave0", {}).get("state")
        return (told, replica.info("replication").get("master_link_status")) == ("online", "up")

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                if condition():
                    return
            assert time.monotonic() < deadline_s, "the failover does not come about"
            time.sleep(0.05)

    def destroy(self) -> None:
        for server in (self._sentinel, *self.servers):
            server.kill()
            server.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
