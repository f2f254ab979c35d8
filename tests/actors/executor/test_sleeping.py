"""How an executor that is to sleep waits until it is woken."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pagebus.actors.executor import sleeping
from pagebus.actors.executor.sleeping import ASLEEP, AWAKE, SLEEPS, SLEEPS_DEEPLY, Sleeping
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.contract import Bus, BusUnavailable

LIGHTLY, DEEPLY = {"level": 1}, {"level": 2}
Answer = dict[str, Any] | Exception | None


class ToldBus:
    """Answers, look by look, whether executors are to sleep."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = iter(answers)

    async def get_state(self, name: str) -> list[dict[str, Any] | None]:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return [answer]


class Sleeper:
    def __init__(self, *answers: Answer) -> None:
        self.metrics, self.states = Metrics(), list[str]()
        self.sleeping = Sleeping(cast("Bus", ToldBus(*answers)), self.metrics, "executor-0")

    async def wait(self) -> list[str]:
        await self.sleeping.wait(self.states.append)
        return self.states

    def shown(self) -> list[str]:
        series = self.metrics.snapshot()["series"]
        return [labels["sleep_state"] for _, labels, data in series if data["value"]]


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "SLEEP_LOOK_S", 0.0)


async def test_who_is_not_to_sleep_goes_on() -> None:
    """Nothing is said of it."""
    assert await Sleeper(None).wait() == []


async def test_it_says_that_it_sleeps_and_that_it_loads_then() -> None:
    sleeper = Sleeper(LIGHTLY, DEEPLY, DEEPLY, None)
    assert await sleeper.wait() == [ASLEEP, "loading"]
    assert sleeper.shown() == []


@pytest.mark.parametrize(("asked", "shown"), [(LIGHTLY, SLEEPS), (DEEPLY, SLEEPS_DEEPLY)])
async def test_woken_while_the_bus_was_away(asked: dict[str, Any], shown: str) -> None:
    """The call that is repeated then finds no wish to sleep, and says all the same that the sleep is over."""
    sleeper = Sleeper(asked, BusUnavailable("away"), None)
    with pytest.raises(BusUnavailable):
        await sleeper.wait()
    assert sleeper.shown() == [shown]
    assert await sleeper.wait() == [ASLEEP, "loading"]
    assert sleeper.shown() == []
    sleeper.sleeping.show(AWAKE)
    assert sleeper.shown() == [AWAKE]
