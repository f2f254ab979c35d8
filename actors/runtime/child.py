"""A child process of the supervisor, in its own session: its output is forwarded and its last lines are kept."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pagebus
from pagebus.actors.telemetry.last_words import heard

PACKAGES = Path(pagebus.__file__).resolve().parents[1]
"""The folder from which Python imports Pagebus."""
TAIL_LINES = 20
LINE_LIMIT = 2**20
"""Longest line of output, bytes; a longer one is passed on in pieces."""
PR_SET_PDEATHSIG = 1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STEADY_S = 60.0
"""A process that ran this long, in seconds, is not in a crash loop, nor are deaths further apart than this."""
CRASH_LOOP = 5


def python_path(environ: Mapping[str, str]) -> str:
    """``PYTHONPATH`` for a Python process that must import the same Pagebus, whatever its working directory holds.

    An editable installation needs none. Its folder is left out, because it would make everything beside Pagebus
    importable.
    """
    searched = {Path(each).resolve() for each in sys.path}
    return os.pathsep.join(filter(None, (str(PACKAGES) if PACKAGES in searched else "", environ.get("PYTHONPATH"))))


def die_with_parent() -> Callable[[], None]:
    """A function for the new process, which makes the kernel kill it when the process that started it dies.

    Linux only; elsewhere it does nothing. Loads the C library now: after the fork only the call is left to do.
    """
    parent = os.getpid()
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None

    def arm() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # died between the fork and the call
            os._exit(1)

    return arm


class Restarts:
    """Restart policy: at once if the process had been ready or ran steadily, else after 1, 2, 4 ... 30 s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._deaths_s: deque[float] = deque(maxlen=CRASH_LOOP)

    def started(self) -> None:
        self._started_s = self._clock()

    def died(self, *, was_ready: bool = False) -> float:
        """Record a death; returns the pause before the next start, in seconds. ``was_ready``: or has left as told."""
        now = self._clock()
        if was_ready or now - self._started_s >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
            self._deaths_s.clear()
            return 0.0
        self._deaths_s.append(now)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    @property
    def looping(self) -> bool:
        """Whether there were ``CRASH_LOOP`` deaths within ``STEADY_S``."""
        deaths = self._deaths_s
        return len(deaths) == CRASH_LOOP and deaths[-1] - deaths[0] <= STEADY_S


class Child:
    """A process and its restarts. ``on_line`` gets each line that it writes to standard output or error, but for the
    sentence that it may end with, which is kept as ``cause``."""

    def __init__(
        self,
        name: str,
        kind: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self.kind = kind
        self.command = list(command)
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.cause = ""
        self.restarts = Restarts(asyncio.get_running_loop().time)
        self._environ = dict(environ)
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None

    @property
    def last_pid(self) -> int | None:
        """Process id, also after its end."""
        return None if self._process is None else self._process.pid

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run_once(self) -> int:
        """Start it and wait for its end; returns the exit code (-n: killed by signal n). Cancelling kills it."""
        self.restarts.started()
        self.tail.clear()
        self.cause = ""
        # A pipe of our own: the event loop's would make wait() wait for grandchildren that hold it open.
        output, inner = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=inner,
                stderr=inner,
                env=self._environ,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(inner)
        reading = asyncio.create_task(self._read(output), name=f"{self.name}:output")
        try:
            return await self._process.wait()
        finally:
            self.signal(signal.SIGKILL)  # and whatever it started
            await asyncio.gather(reading, self._process.wait(), return_exceptions=True)

    async def _read(self, output: int) -> None:
        """Forward lines until every process that holds the other end is gone."""
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        try:
            await self._read_lines(reader)
        finally:
            transport.close()

    async def _read_lines(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                line = error.partial
            except asyncio.LimitOverrunError as error:
                line = await reader.read(max(1, error.consumed))
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\r\n")
            if cause := heard(text):
                self.cause = cause
                continue
            self.tail.append(text)
            self._on_line(text)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all of its descendants; nothing happens if they are gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
