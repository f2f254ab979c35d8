"""Who is taken on next."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from pagebus.web.jobs.window import Owner, Window

LONG_S = 60.0


class Clients:
    """Batches whose lines enter a window as there is room; ``end`` ends those lines that have been longest in it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.under_way: deque[Owner] = deque()
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, owner: Owner, lines: int) -> None:
        self.tasks.append(asyncio.create_task(self._work(owner, lines)))

    async def _work(self, owner: Owner, lines: int) -> None:
        for _ in range(lines):
            while not self.window.room(owner):
                await self.window.freed(LONG_S, owner)
            self.window.enter(1, owner)
            self.under_way.append(owner)

    async def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.window.leave(1, self.under_way.popleft())
        await self.rest()

    @staticmethod
    async def rest() -> None:
        """Until whoever may enter has."""
        for _ in range(20):
            await asyncio.sleep(0)

    def held(self) -> Counter[str]:
        return Counter(owner.name for owner in self.under_way)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_owners_share_by_their_weights() -> None:
    """However many batches one has: when all that was there at first has ended, each holds its share."""
    clients = Clients(Window(12))
    for _ in range(10):
        clients.begin(Owner("many"), 1000)
    await clients.rest()
    assert clients.held() == {"many": 12}, "alone it has all"
    clients.begin(Owner("one"), 1000)
    clients.begin(Owner("heavy", 2.0), 1000)
    await clients.rest()
    for _ in range(24):
        await clients.end()
        assert clients.window.jobs == 12, "nothing is left free"
    assert clients.held() == {"many": 3, "one": 3, "heavy": 6}
    await clients.stop()


async def test_what_one_does_not_want_the_others_have() -> None:
    """Who has no more lines waits no more; several places that become free at once are all taken."""
    clients = Clients(Window(12))
    clients.begin(Owner("a"), 1000)
    clients.begin(Owner("b"), 2)
    await clients.rest()
    await clients.end(8)
    assert clients.held() == {"a": 10, "b": 2}
    await clients.end(12)
    assert clients.held() == {"a": 12}
    clients.begin(Owner("c"), 1000)
    await clients.rest()
    await clients.end(5)
    assert clients.held() == {"a": 7, "c": 5}
    await clients.end(7)
    assert clients.held() == {"a": 6, "c": 6}
    await clients.stop()
