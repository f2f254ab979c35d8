"""How long one turn of an ingress's event loop takes beside each bomb of :mod:`tests.chaos.bombs`.

    python -m tests.chaos.bomb_turns [--only NAME] [--seconds 2]

An ingress over a memory bus, a fake backend behind it, eight of a bomb at once from threads. Told is the longest turn
of a task of the ingress in milliseconds of processor time, which, unlike waiting times, a busy machine changes little;
and whose turn that was. The next bomb waits until nothing of the one before is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from asyncio.events import Handle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from pagebus.actors.runtime.gc_tuning import keep_what_is_there
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import GenerateRequest
from tests.chaos.bombs import BOMBS, VOCAB, throw
from tests.helpers.waiting import until_empty
from tests.web.fake_backend import MODEL, start_served

MAX_CHARS = 65_536
AT_ONCE = 8


class Turns:
    """The longest turn of each kind of task since the last look."""

    def __init__(self) -> None:
        self.longest_ms, self.whose = 0.0, ""
        self._run = Handle._run

    def watch(self) -> None:
        turns, run = self, self._run

        def timed(handle: Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            took_ms = (time.thread_time() - began_s) * 1e3
            if took_ms > turns.longest_ms and not is_ours(handle):
                turns.longest_ms, turns.whose = took_ms, name_of(handle)

        Handle._run = timed  # type: ignore[method-assign]


class Forgetful(list[GenerateRequest]):
    """What the fake backend would remember, and the garbage collector look at again and again."""

    def append(self, _: GenerateRequest) -> None:
        pass


def task_of(handle: Handle) -> asyncio.Task[Any] | None:
    """The task whose turn it is; None: a mere callback."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    return task if isinstance(task, asyncio.Task) else None


def is_ours(handle: Handle) -> bool:
    """Whether it is of this script or of the fake backend."""
    task = task_of(handle)
    code = getattr(task.get_coro(), "cr_code", None) if task is not None else None
    return code is not None and ("fake_backend" in code.co_filename or "bomb_turns" in code.co_filename)


def name_of(handle: Handle) -> str:
    """The coroutine of its task, or the callback."""
    task, callback = task_of(handle), getattr(handle, "_callback", None)
    of = callback if task is None else task.get_coro()
    return str(getattr(of, "__qualname__", of))


async def main(only: str, seconds: float) -> None:
    server, turns = MemoryServer(), Turns()
    served = await start_served(lambda: MemoryBus(server), replace(MODEL, vocab_size=VOCAB, max_model_len=1024))
    await served.backend.leave("tokenizer")
    await served.backend.join("tokenizer", max_prompt_chars=MAX_CHARS)
    await served.refresh()
    served.backend.requests = Forgetful()
    turns.watch()
    keep_what_is_there()  # as a process of an actor does
    loop = asyncio.get_running_loop()
    print("| bomb | longest turn, ms of CPU | whose |\n| --- | --- | --- |")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for bomb in (each for each in BOMBS if only in each.name):
            asked = {"model": "fake-model", **await asyncio.to_thread(bomb.body)}
            body = (await asyncio.to_thread(json.dumps, asked)).encode()
            turns.longest_ms, told = 0.0, SimpleQueue[Any]()
            arguments = (served.url, bomb.path, body, time.time() + seconds, told)
            await asyncio.gather(*(loop.run_in_executor(pool, throw, *arguments) for _ in range(AT_ONCE)))
            await served.actor.context.inbox.idle()
            await until_empty(served.backend.bus, served.backend.names.replies(served.address))
            print(f"| {bomb.name} | {turns.longest_ms:.1f} | {turns.whose} |", flush=True)
    await served.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bombs with this in their names")
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.only, arguments.seconds))
