"""A child process that answers questions one at a time, line by line, and may be lost with any of them.

Its limit is computing time, which the kernel counts, so a busy or suspended machine is never blamed on a question. A
child that has ended, was killed or was left in the middle of a question gets no further one; the next question gets a
new child.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence

from pagebus.actors.runtime.child import die_with_parent

START_TIMEOUT_S = 60.0
WALL_S = 60.0
"""After this time a child that gets no processor is given up."""
MAX_LINE_BYTES = 64 * 2**20
READY = b"ready\n"
TRIES = 2
"""Attempts at a question whose child dies: the question need not be what ended the first one."""


class OutOfTime(Exception):
    """The child used its computing time up."""


class Died(Exception):
    """Two children, one after the other, died of the question."""


class TrialProcess:
    """``command`` gives what to run; it writes ``READY``, then a line for each line, and sets itself a limit of
    computing time (``SIGPROF``). One question at a time."""

    def __init__(self, command: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: bytes) -> bytes:
        """The answer to a line, without its end.

        Raises:
            OutOfTime, Died: see there.
            TimeoutError: the child got no processor for so long that it was given up.
            ChildProcessError: it did not start.
        """
        for _ in range(TRIES):
            process = self._process or await self._start()
            self._process = None  # until it has answered
            try:
                if answer := await _answer(process, question):
                    self._process = process
                    return answer
            finally:
                if self._process is None:
                    await _end(process)
            if process.returncode == -signal.SIGPROF:
                raise OutOfTime
        raise Died

    async def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _start(self) -> asyncio.subprocess.Process:
        """A child that is ready."""
        process = await asyncio.create_subprocess_exec(
            *await self._command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES, preexec_fn=die_with_parent(),
        )  # fmt: skip
        ready = False
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await process.stdout.readline() == READY
        finally:
            if not ready:
                await _end(process)
        if not ready:
            raise ChildProcessError(f"a child did not start: it ended with {process.returncode}")
        return process


async def _answer(process: asyncio.subprocess.Process, question: bytes) -> bytes:
    """The child's answer; empty if it has ended, in which case its exit status is known."""
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(WALL_S):
        with contextlib.suppress(ConnectionError, RuntimeError):  # the latter is uvloop's, of a pipe that is closed
            process.stdin.write(question + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if line.endswith(b"\n"):
                return line.removesuffix(b"\n")
        await process.wait()  # asyncio reports 255 for a dead child that is killed before it has looked at it
    return b""


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
