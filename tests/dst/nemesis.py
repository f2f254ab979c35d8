"""What goes wrong: faults at random times, of a choice that the seed makes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from pagebus.actors.executor.device.errors import EngineError
from tests.dst.past import Past
from tests.dst.seams import WallClock
from tests.dst.world import FAULT, Life, World

HOUR_S = 3600.0


class Nemesis:
    """``only``: the one fault it knows, and the kind of actor that it hits; None: what the seed chooses."""

    def __init__(self, world: World, wall: WallClock, rng: random.Random, only: tuple[str, str] | None = None) -> None:
        self._world, self._wall, self._rng = world, wall, rng
        self._only = only
        self._tasks: set[asyncio.Task[None]] = set()
        self.done: dict[str, int] = {}
        every: dict[str, tuple[float, Callable[[], None]]] = {
            "kill": (6, self.kill),
            "kill at a turn": (6, self.kill_at_turn),
            "freeze": (4, self.freeze),
            "drain": (1, self.drain),
            "device": (1, self.device_fault),
            "lose": (4, self.lose),
            "slow": (2, self.slow),
            "cut": (2, self.cut),
            "refuse": (1, self.refuse),
            "twice": (2, self.twice),
            "bus clock": (1, self.bus_clock),
            "wall clock": (1, self.wall_clock),
            "set back": (2, self.rolled_back),
        }
        chosen = [name for name in every if rng.random() < 0.6] or ["kill"]
        every["drain an executor"] = (4, self.drain_executor)
        if world.links is not None:
            chosen.append("drain an executor")
        self._faults = {name: every[name] for name in chosen} if only is None else {only[0]: every[only[0]]}
        self.kills_ingresses = rng.random() < 0.5 and only is None
        self.pause_s = rng.choice((0.3, 1.0, 3.0)) if only is None else 0.3

    @property
    def spares_ingresses(self) -> bool:
        """Whether clients without keys get their answers: ingresses are neither killed, nor so far away that their
        leases lapse. At 500 times the usual latency, an exchange takes up to half a lease's time."""
        return not self.kills_ingresses

    async def run(self, for_s: float) -> None:
        """Make trouble for so long."""
        until_s = self._world.loop.time() + for_s
        while (left_s := until_s - self._world.loop.time()) > 0:
            await asyncio.sleep(min(left_s, self._rng.expovariate(1 / self.pause_s)))
            names = list(self._faults)
            (name,) = self._rng.choices(names, [self._faults[each][0] for each in names])
            self.done[name] = self.done.get(name, 0) + 1
            self._faults[name][1]()
        for task in self._tasks:
            task.cancel()

    # -- actors -------------------------------------------------------------------------------------------------------
    def _victim(self) -> Life | None:
        lives = [life for life in self._world.living if self.kills_ingresses or life.kind != "ingress"]
        lives = [life for life in lives if self._only is None or life.kind == self._only[1]]
        return self._rng.choice(lives) if lives else None

    def kill(self) -> None:
        if (life := self._victim()) is not None:
            self._world.kill(life)

    def kill_at_turn(self) -> None:
        if (life := self._victim()) is not None:
            self._world.at_random_turn(life, self._world.kill, self._rng.choice((5, 50, 500)))

    def freeze(self) -> None:
        if (life := self._victim()) is not None:
            ttl_s = self._world.settings.lease_ttl_s
            seconds = self._rng.choice((0.2, 0.9, 1.1, 1.7, 4.0)) * ttl_s * self._rng.uniform(0.8, 1.2)
            self._world.at_random_turn(life, lambda each: self._world.freeze(each, seconds), 50)

    def drain(self) -> None:
        if (life := self._victim()) is not None:
            self._world.drain(life)

    def drain_executor(self) -> None:
        """Others pull from it, and perhaps it does from others."""
        if lives := [life for life in self._world.living if life.kind == "executor"]:
            self._world.drain(self._rng.choice(lives))

    def device_fault(self) -> None:
        lives = [life for life in self._world.living if life.kind == "executor"]
        engine = getattr(self._rng.choice(lives).actor, "_engine", None) if lives else None
        if engine is not None:
            self._world.tell("DEVICE FAULT")
            engine.fail(EngineError(FAULT))

    # -- the network and the bus --------------------------------------------------------------------------------------
    def _for_a_while(self, what: str, begin: Callable[[], None], end: Callable[[], None], most_s: float) -> None:
        async def last() -> None:
            seconds = self._rng.uniform(0.05, most_s)
            self._world.tell(f"{what} for {seconds:.2f} s")
            begin()
            try:
                await asyncio.sleep(seconds)
            finally:
                end()

        task = asyncio.create_task(last())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lose(self) -> None:
        network, chance = self._world.network, self._rng.choice((0.02, 0.1, 0.5))
        self._for_a_while(
            f"LOSE {chance}", lambda: setattr(network, "lost", chance), lambda: setattr(network, "lost", 0.0), 3
        )

    def slow(self) -> None:
        network = self._world.network
        times = self._rng.choice((10.0, 100.0) if self.spares_ingresses else (10.0, 100.0, 500.0))
        self._for_a_while(
            f"SLOW {times}", lambda: setattr(network, "slow", times), lambda: setattr(network, "slow", 1.0), 3
        )

    def cut(self) -> None:
        network, life = self._world.network, self._victim()
        name = None if self._rng.random() < 0.3 or life is None else life.name
        self._for_a_while(f"CUT {name}", lambda: network.cut.add(name), lambda: network.mend(name), 8)

    def refuse(self) -> None:
        network = self._world.network
        self._for_a_while(
            "REFUSE", lambda: setattr(network, "refusing", True), lambda: setattr(network, "refusing", False), 6
        )

    def twice(self) -> None:
        network = self._world.network
        self._for_a_while("TWICE", lambda: setattr(network, "twice", 0.3), lambda: setattr(network, "twice", 0.0), 4)

    def rolled_back(self) -> None:
        """The server dies, and comes back with what it had stored a moment before, or with nothing. Somebody may stand
        still meanwhile: all that he would have read is lost."""
        world, within_s = self._world, 1.0
        past = Past(None if self._rng.random() < 0.3 else world.server)
        readers = [life for life in world.living if life.kind in ("scheduler", "executor", "detokenizer")]
        if readers and self._rng.random() < 0.5:
            world.freeze(self._rng.choice(readers), 1.5 * within_s)
        self._for_a_while("SET BACK after", lambda: None, lambda: world.network.restart(past), within_s)

    # -- clocks -------------------------------------------------------------------------------------------------------
    def bus_clock(self) -> None:
        """An hour ahead: all leases expire."""
        self._world.tell("BUS CLOCK")
        self._world.bus_ahead_s += HOUR_S

    def wall_clock(self) -> None:
        self._wall.ahead_s += self._rng.choice((-HOUR_S, -1.0, 1.0, HOUR_S))
        self._world.tell(f"WALL CLOCK {self._wall.ahead_s:+}")
