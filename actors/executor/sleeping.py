"""Executors asleep, by an operator's command to all (``/sleep``): nothing of the model is in memory until they are
woken. An executor that is awake ends when it is to sleep; restarted, it waits here before it loads the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.contract import Bus
from pagebus.bus.messages import SLEEP_STATE

SLEEP_LOOK_S = 0.25
AWAKE, SLEEPS, SLEEPS_DEEPLY = "awake", "weights_offloaded", "discard_all"
"""vLLM's names. The two kinds of sleep differ here in nothing but their names."""
ASLEEP = "asleep"
"""The state in the lease of an executor that sleeps."""


class Sleeping:
    """What one executor says of its sleep, and how it waits for its end."""

    def __init__(self, bus: Bus, metrics: Metrics, name: str) -> None:
        self._bus, self._asleep = bus, False
        self._gauges = {
            state: metrics.gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.", engine=name,
                                 sleep_state=state)
            for state in (AWAKE, SLEEPS, SLEEPS_DEEPLY)
        }  # fmt: skip

    def show(self, shown: str) -> None:
        """The engine is in this state; "": it is being loaded."""
        for state, gauge in self._gauges.items():
            gauge.set(state == shown)

    async def wait(self, set_state: Callable[[str], None]) -> None:
        """Wait until no operator wants executors to sleep; without such a request it returns after one look. May be
        called again after an error of the bus."""
        while (state := (await self._bus.get_state(SLEEP_STATE))[0]) is not None:
            self.show(SLEEPS_DEEPLY if state.get("level") == 2 else SLEEPS)
            if not self._asleep:
                self._asleep = True
                set_state(ASLEEP)
            await asyncio.sleep(SLEEP_LOOK_S)
        if self._asleep:
            self._asleep = False
            self.show("")
            set_state("loading")
