"""An event loop whose time is made up and whose turns are drawn: a seed gives the same run on every machine.

Callbacks belong to a :class:`Process`, which stands for a process of the operating system. Those of one process run in
their order, those of several are mixed at random. When nothing can run, time jumps to the next timer. Threads run
inline, and sockets are pairs of objects.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.dst.pipe import Listener, connect_pipe

START_S = 1000.0
TURN_S = 2e-6
"""What a callback takes."""
THREAD_S = (1e-4, 5e-3)
"""What a thread's work takes."""


class Stuck(AssertionError):
    """Nothing can ever happen again, or things go on for ever."""


@dataclass(slots=True, eq=False)
class Process:
    """``frozen``: none of its callbacks runs. ``fuse``: ``on_fuse`` is called after so many more of them; 0: never.
    ``tasks``: all it ever had."""

    name: str
    number: int
    queue: deque[asyncio.Handle] = field(default_factory=deque)
    frozen: bool = False
    fuse: int = 0
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    on_fuse: Callable[[], None] = lambda: None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module's text.

    Attributes:
        turns: callbacks run so far; ``most_turns`` and ``until_s`` bound the run.
        digest: of all turns so far; two runs that agree in it were the same.
        listeners: who accepts connections.
    """

    def __init__(self, rng: random.Random, *, most_turns: int = 1_000_000, until_s: float = 3_000.0) -> None:
        super().__init__()
        self.now_s = START_S
        self.turns = 0
        self.digest = 0
        self.most_turns, self.until_s = most_turns, until_s
        self.listeners: dict[int, Listener] = {}
        self._rng = rng
        self._processes: list[Process] = []
        self._outside = self.process("world")

    def process(self, name: str) -> Process:
        """A new process; what is started in its context belongs to it."""
        process = Process(name, len(self._processes))
        process.context.run(PROCESS.set, process)
        self._processes.append(process)
        return process

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task that its process knows."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        context = options.get("context") or contextvars.copy_context()
        context.get(PROCESS, self._outside).tasks.append(task)
        return task

    def tasks_of(self, process: Process) -> list[asyncio.Task[Any]]:
        """All of a process, in an order that a seed gives again; aiohttp makes some without the loop."""
        others = (
            sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name) if hasattr(asyncio.Task, "get_context") else []
        )
        return process.tasks + [task for task in others if task.get_context().get(PROCESS) is process]

    def drop(self, process: Process) -> None:
        """Nothing of a process will ever run again."""
        process.queue.clear()
        self._processes.remove(process)

    # -- time and turns -----------------------------------------------------------------------------------------------
    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        """One callback of one process."""
        due, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while due and (due[0]._cancelled or due[0]._when <= self.now_s):
            timer = heapq.heappop(due)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        for handle in ready:
            handle._context.get(PROCESS, self._outside).queue.append(handle)
        ready.clear()
        able = [process for process in self._processes if process.queue and not process.frozen]
        if able:
            self._turn(able[0] if len(able) == 1 else able[int(self._rng.random() * len(able))])
        elif due:
            self.now_s = max(self.now_s, due[0]._when)
        else:
            raise Stuck("everybody waits, and no time is set")

    def _turn(self, process: Process) -> None:
        handle = process.queue.popleft()
        if handle._cancelled:
            return
        self.turns += 1
        self.digest = hash((self.digest, process.number, self.now_s))
        if self.turns > self.most_turns or self.now_s > self.until_s:
            raise Stuck(f"no end after {self.turns} turns and {self.now_s - START_S:.0f} s")
        handle._run()
        self.now_s += TURN_S
        if process.fuse:
            process.fuse -= 1
            if not process.fuse:
                process.on_fuse()

    def _write_to_self(self) -> None:
        """Nothing sleeps."""

    # -- threads and sockets ------------------------------------------------------------------------------------------
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run ``func`` here, a moment later."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.uniform(*THREAD_S), run)
        return future

    async def create_server(self, factory: Any, *args: Any, sock: Any, **kwargs: Any) -> Any:
        """Accept connections under the number that ``sock`` has."""
        listener = Listener(self, sock.getsockname()[1], factory, PROCESS.get(self._outside))
        self.listeners[listener.port] = listener
        return listener

    def connect(self, factory: Callable[[], asyncio.Protocol], port: int, name: str) -> asyncio.Protocol:
        """A connection of the running process, called ``name``, to whoever listens there.

        Raises:
            ConnectionRefusedError: nobody does.
        """
        listener = self.listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        return connect_pipe(self, factory, listener, PROCESS.get(self._outside), name, self._rng)
