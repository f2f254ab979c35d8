"""How long one turn of an ingress's event loop takes beside each bomb of :mod:`tests.chaos.bombs`.

    python -m tests.chaos.bomb_turns

An ingress over a memory bus, a fake backend behind it, eight of a bomb at once from threads. Told is the longest turn
of a task of the ingress in milliseconds of processor time, which, unlike waiting times, a busy machine changes little.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.events import Handle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "web"))

from fake_backend import MODEL, start_served

from bus.memory_bus import MemoryBus
from bus.memory_server import MemoryServer
from tests.chaos.bombs import BOMBS, VOCAB, throw

MAX_CHARS = 65_536
AT_ONCE = 8
SECONDS = 2.0


class Turns:
    """The longest turn of each kind of task since the last look."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._run = Handle._run

    def watch(self) -> None:
        turns, run = self, self._run

        def timed(handle: Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            took_ms = (time.thread_time() - began_s) * 1e3
            if took_ms > turns.longest_ms and not is_ours(handle):
                turns.longest_ms = took_ms

        Handle._run = timed  # type: ignore[method-assign]


def is_ours(handle: Handle) -> bool:
    """Whether it is of this script or of the fake backend."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    code = getattr(task.get_coro(), "cr_code", None) if isinstance(task, asyncio.Task) else None
    return code is not None and ("fake_backend" in code.co_filename or "bomb_turns" in code.co_filename)


async def main() -> None:
    server, turns = MemoryServer(), Turns()
    served = await start_served(lambda: MemoryBus(server), replace(MODEL, vocab_size=VOCAB, max_model_len=1024))
    await served.backend.leave("tokenizer")
    await served.backend.join("tokenizer", max_prompt_chars=MAX_CHARS)
    await served.refresh()
    turns.watch()
    loop = asyncio.get_running_loop()
    print("| bomb | longest turn, ms of CPU |\n| --- | --- |")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for bomb in BOMBS:
            asked = {"model": "fake-model", **await asyncio.to_thread(bomb.body)}
            body = (await asyncio.to_thread(json.dumps, asked)).encode()
            turns.longest_ms, told = 0.0, SimpleQueue[Any]()
            arguments = (served.url, bomb.path, body, time.time() + SECONDS, told)
            await asyncio.gather(*(loop.run_in_executor(pool, throw, *arguments) for _ in range(AT_ONCE)))
            print(f"| {bomb.name} | {turns.longest_ms:.1f} |", flush=True)
    await served.stop()


if __name__ == "__main__":
    asyncio.run(main())
