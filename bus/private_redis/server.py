"""A private redis-server: ``pagebus serve`` starts one if ``--bus`` is not given, and tests use it.

It listens only on a Unix socket, in a folder that other users cannot enter, and keeps its data in an append-only file,
so that it survives being killed. Restarted on the same folder it continues with its data. A damaged file is repaired as
far as possible: see :mod:`pagebus.bus.private_redis.append_only`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from pagebus.bus.contract import BusError
from pagebus.bus.private_redis.append_only import DAMAGE, remedies
from pagebus.bus.private_redis.rewriting import LOOK_S, Rewriting

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 5.0
_SOCKET_PATH_BYTES = 107
"""Longest path a Unix socket can have on Linux (108 bytes with the closing zero; 104 on macOS)."""
_LOG_LINES = 5
_LOG = logging.getLogger("bus")


class Damaged(BusError):
    """The server cannot load its file."""


def find_redis_server() -> str | None:
    """The path of the redis-server (or valkey-server) program, None if there is none on PATH."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class PrivateRedis:
    """One redis-server process with its data, log and (if its path is short enough) socket in ``folder``.

    Args:
        folder: created with mode 0700 if missing; one server at a time uses it. None: a temporary one, which
            :meth:`stop` removes together with the data.
        fsync: ``always``, or ``everysec``, with which a power cut may cost the last second; so may a kill -9 of the
            server itself (up to two seconds) while the disk is slow, since Redis then holds back what it has answered.
        detach: give the server a process group of its own, so that Ctrl-C reaches the actors and they can still say
            goodbye over the bus; :meth:`stop` ends it.
        before_exec: called in the new process before it becomes the server, for example to tie it to its parent's life.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        fsync: str = "everysec",
        detach: bool = True,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="pagebus-") if folder is None else folder).resolve()
        self._fsync = fsync
        self._detach = detach
        self._before_exec = before_exec
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._socket_folder: Path | None = None
        self._socket = self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """The bus URL of the server."""
        return f"unix://{self._socket}"

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.folder / "redis.log"

    @property
    def pid(self) -> int | None:
        """Process id while the server runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> str:
        """Start the server and wait until it has loaded its data; returns its URL. A file that it cannot load is
        repaired, and the log says what is lost.

        Raises:
            BusError: there is no redis-server program, or it died; with the end of its log.
        """
        if self.pid is not None:
            return self.url
        program = find_redis_server()
        if program is None:
            raise BusError("no redis-server found on PATH: install Redis 7 or newer, or name a running one with --bus")
        self._prepare_folder()
        untried = iter(remedies())
        while True:
            try:
                await self._start(program)
                return self.url
            except Damaged as error:
                done = await asyncio.to_thread(lambda: next(filter(None, (cure(self.folder) for cure in untried)), ""))
                if not done:
                    raise
                _LOG.error("the private Redis server could not load its file: %s (%s)", done, error)

    async def _start(self, program: str) -> None:
        self._socket.unlink(missing_ok=True)
        logged = self.log_path.stat().st_size if self.log_path.exists() else 0
        rewriting = Rewriting(self.log_path, self._ask)
        self._process = await asyncio.create_subprocess_exec(
            program,
            str(self._write_config()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=self._detach,
            preexec_fn=self._before_exec,
        )
        try:
            await self._wait_until_ready(self._process, logged)
        except BaseException:
            self.kill()
            raise
        self._watching = asyncio.create_task(self._watch(self._process, rewriting), name="redis watch")

    async def _watch(self, process: asyncio.subprocess.Process, rewriting: Rewriting) -> None:
        """Watch the process while the server runs."""
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), LOOK_S)
                return
            with contextlib.suppress(OSError):
                await rewriting.look()

    async def wait(self) -> int:
        """Wait until the server ends, for whatever reason; returns its exit status."""
        if self._process is None:
            raise BusError("this Redis server was never started")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server in good order (it saves what it has) and remove its socket. Idempotent."""
        process, self._process = self._process, None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                _LOG.warning("the private Redis server did not end within %.0f s and is killed", STOP_TIMEOUT_S)
                process.kill()
                await process.wait()
        self._socket.unlink(missing_ok=True)
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder, self._socket = None, self.folder / "redis.sock"
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End the server at once with SIGKILL, as a crash would; its data stays."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        if len(os.fsencode(self._socket)) > _SOCKET_PATH_BYTES:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="pagebus-", dir="/tmp"))  # mode 0700
            self._socket = self._socket_folder / "redis.sock"

    def _write_config(self) -> Path:
        settings = {
            "port": "0",
            "unixsocket": _quote(str(self._socket)),
            "unixsocketperm": "700",
            "dir": _quote(str(self.folder)),
            "logfile": _quote(str(self.log_path)),
            "daemonize": "no",
            "databases": "1",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "maxmemory-policy": "noeviction",
        }
        path = self.folder / "redis.conf"
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        return path

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, logged: int) -> None:
        """``logged``: the size of the log before this start."""
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    await asyncio.wait((ended,), timeout=0.02)
                    if ended.done():
                        raise (Damaged if DAMAGE.search(self._log_since(logged)) else BusError)(
                            f"redis-server ended with status {ended.result()} when it was started in {self.folder}: "
                            f"{self._log_tail()}"
                        )
        except TimeoutError:
            raise BusError(
                f"redis-server in {self.folder} is not ready after {START_TIMEOUT_S:.0f} s: {self._log_tail()}"
            ) from None
        finally:
            ended.cancel()

    async def _answers(self) -> bool:
        try:
            return await self._ask("PING") == b"+PONG\r\n"  # not so while it loads its data
        except OSError:
            return False

    async def _ask(self, command: str) -> bytes:
        """The answer to a command, without the client library: importing that would take longer than the server takes
        to start.

        Raises:
            OSError: there is none.
        """
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(command.encode() + b"\r\n")
                    line = await reader.readline()
                    return await reader.readexactly(int(line[1:])) if line.startswith(b"$") else line
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError(f"redis-server went away as it answered {command}") from error

    def _log_since(self, position: int) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(position)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it wrote no log"
        return " | ".join(lines[-_LOG_LINES:]) or "its log is empty"


def _quote(text: str) -> str:
    """A value of redis.conf that may hold spaces."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
