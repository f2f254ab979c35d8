"""Renders chat templates safely: in a child process with limits of computing time and memory.

A template is a program. The sandbox isolates it, but it can loop and build huge strings. So it runs in a child process
that the kernel ends when its time is used up, and that gets no more memory than its limit. The caller then gets an
error, and the next call a new child. The child is a fork: it already has the tokenizer, and starts within milliseconds.
It uses nothing that other threads of its parent may have locked at that moment, except the Python interpreter's own
locks, which a fork releases.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

CPU_S = 1.0
"""Computing time of one rendering. Templates of real models take less than 0.01 s, and 0.1 s the first time."""
WALL_S = 30.0
"""After this time a child that gets no processor is given up."""
STOOD_STILL = -1
"""In place of the signal that ended a child: it was given up."""
MEMORY_BYTES = 256 * 2**20
"""Memory that the child may take beyond its parent's."""
MAX_CHARS = 16 * 2**20
"""Length of a rendered chat, at most."""

Render = Callable[[dict[str, Any]], str]


class RenderLimit(Exception):
    """The template took too much time or memory, or wrote too much; the text says what may be taken."""


class RenderFailure(Exception):
    """What the template raised. ``refused``: on purpose."""

    def __init__(self, text: str, *, refused: bool) -> None:
        super().__init__(text)
        self.refused = refused


class RenderProcess:
    """One child that renders, one chat after another. Thread-safe."""

    def __init__(self, render: Render, *, refusals: type[Exception], cpu_s: float = CPU_S) -> None:
        """``render`` runs in the child; ``refusals`` are what it raises where a template refuses a chat."""
        self._render = render
        self._refusals = refusals
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._pid = 0
        self._pipe: Connection | None = None

    def render(self, chat: dict[str, Any]) -> str:
        """The rendered chat (a JSON object of what ``render`` takes).

        Raises:
            RenderFailure: the template raised.
            RenderLimit: it was ended.
            TimeoutError: children got no processor for ``WALL_S``, which is not the template's fault.
        """
        asked = json.dumps(chat).encode()
        with self._lock:
            answer, end = self._ask(asked)
            if not answer and end != signal.SIGPROF:  # something else has ended it; the chat need not be the cause
                answer, end = self._ask(asked)
        if not answer and end == STOOD_STILL:
            raise TimeoutError(f"two children that render chats stood still for {WALL_S:g} s")
        if not answer:
            raise RenderLimit(f"it may take {self._cpu_s:g} s and {MEMORY_BYTES >> 20} MiB")
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == b"=":
            return text
        if kind == b"#":
            raise RenderLimit(text)
        raise RenderFailure(text, refused=kind == b"!")

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _ask(self, asked: bytes) -> tuple[bytes, int]:
        """The child's answer; or an empty one, and the signal that ended it (0: none; ``STOOD_STILL``: it was given
        up). A child that owes an answer gets no other question."""
        pipe, answer, end = self._pipe or self._start(), b"", 0
        try:
            pipe.send_bytes(asked)
            if pipe.poll(WALL_S):
                answer = pipe.recv_bytes()
            else:
                end = STOOD_STILL
        except (EOFError, OSError):
            pass
        finally:
            if not answer:
                ended_by = self._end()
                end = end or ended_by
        return answer, end

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with warnings.catch_warnings():  # of Python 3.12, about threads: see the module's text
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._serve(theirs)
        theirs.close()
        self._pid, self._pipe = pid, ours
        return ours

    def _end(self) -> int:
        """The signal that ended the child, 0 if none did."""
        if self._pipe is None:
            return 0
        status = 0
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            status = os.waitpid(self._pid, 0)[1]
        self._pipe = None
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    # -- the child ----------------------------------------------------------------------------------------------------

    def _serve(self, pipe: Connection) -> None:
        """Render until the pipe is closed, which it also is when the parent dies; never returns."""
        try:
            _settle_down(pipe.fileno())
            while True:
                chat = json.loads(pipe.recv_bytes())
                signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
                answer = self._answer(chat)
                signal.setitimer(signal.ITIMER_PROF, 0)
                pipe.send_bytes(answer)
        finally:
            os._exit(0)

    def _answer(self, chat: dict[str, Any]) -> bytes:
        try:
            text = self._render(chat)
        except MemoryError:
            return b"#" + f"it may take {MEMORY_BYTES >> 20} MiB".encode()
        except self._refusals as error:
            return b"!" + _text_of(error)
        except Exception as error:
            return b"?" + _text_of(error)
        if len(text) > MAX_CHARS:
            return b"#" + f"a chat may become {MAX_CHARS} characters".encode()
        return b"=" + text.encode("utf-8", "surrogatepass")


def _text_of(error: Exception) -> bytes:
    return (str(error) or type(error).__name__)[:1000].encode("utf-8", "replace")


def _settle_down(keep: int) -> None:
    """Of what the parent had, keep one pipe and the standard streams; take little, and die of signals."""
    for each in (signal.SIGPROF, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends us when it is done
    signal.set_wakeup_fd(-1)
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
