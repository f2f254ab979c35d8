"""An executor that computes nothing: its steps take as long as a profile of a device says, so that all else of a
deployment can be measured without one. ``python -m tests.browser.modelled_executor PROFILE actor executor ...``.

It speaks to the bus like the real one, in the same kind of process, and holds the same books of slots and blocks; its
tokens are numbers without meaning. While the modelled device works, the process sleeps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace

from pagebus.actors.commands import cli
from pagebus.actors.runtime import process
from pagebus.actors.runtime.actor import Actor
from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.deployment import DEFAULT_BUDGET
from pagebus.actors.simulator.executor import ModelExecutor
from pagebus.actors.simulator.profile import Profile, load_profile
from pagebus.bus.contract import Bus, Entry
from pagebus.bus.messages import StepPlan, StepResult
from pagebus.bus.outbox import Outbox

READ_BLOCK_MS = 200
NEVER = 2**30


class ModelledExecutor(Actor):
    """One modelled device."""

    kind: ClassVar[str] = "executor"
    profile: ClassVar[Profile]
    vocab_size = 2**15
    """Ids of tokens are below it."""

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self._model: ModelExecutor | None = None
        self._scheduler_epoch = 0
        self._free_s = 0.0
        self._done: asyncio.Queue[StepResult] = asyncio.Queue()
        text = "Seconds the modelled device worked on steps."
        self._busy = self.metrics.counter("pagebus:executor_busy_seconds_total", text, engine=name)
        self._steps = self.metrics.counter("pagebus:executor_steps_total", "Steps computed.", engine=name)

    @property
    def _joined(self) -> ReplicaJoined:
        profile, settings = self.profile, self.settings
        return ReplicaJoined(
            replica=self.name,
            epoch=self.epoch,
            num_blocks=settings.num_gpu_blocks_override or profile.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len or profile.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_BUDGET,
        )

    def lease_info(self) -> dict[str, Any]:
        """What the scheduler plans by."""
        joined = self._joined
        names = ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens")
        told = {name: getattr(joined, name) for name in names}
        return {**super().lease_info(), **told, "vocab_size": self.vocab_size, "device": "modelled", "dtype": "none"}

    async def start(self) -> None:
        self._position = await self.bus.last_id(self.names.steps(self.name))
        self._outbox = Outbox(self.bus, self.epoch)
        self.spawn(self._outbox.run(), "outbox")
        self.spawn(self._tell(), "results")

    async def serve(self) -> None:
        stream = self.names.steps(self.name)
        while not self.draining.is_set():
            for entry in await self.bus.read({stream: self._position}, block_ms=READ_BLOCK_MS):
                self._position = entry.id
                self._take(entry)

    def _take(self, entry: Entry) -> None:
        plan = entry.message
        assert isinstance(plan, StepPlan)
        if plan.executor_epoch not in (0, self.epoch):
            return
        if self._model is None or entry.id.epoch > self._scheduler_epoch:
            self._scheduler_epoch = entry.id.epoch
            make = partial(ModelExecutor, self._joined, self.profile, lambda _: NEVER)
            self._model = make(scheduler_epoch=self._scheduler_epoch)
        result = self._model.execute(plan, time.time(), self._free_s)
        self._free_s = result.done_s
        self._done.put_nowait(replace(result, token_ids=result.token_ids % (self.vocab_size - 256) + 256))

    async def _tell(self) -> None:
        while True:
            result = await self._done.get()
            await asyncio.sleep(max(0.0, result.done_s - time.time()))
            self._outbox.append(self.names.results(self.name), result)
            self._busy.inc(result.busy_s)
            self._steps.inc()


def main() -> int:
    """``pagebus``, whose executors are modelled."""
    from tests.browser.modelled_executor import ModelledExecutor as Imported  # not this one, which is __main__'s

    Imported.profile = load_profile(sys.argv[1])
    process.CLASSES["executor"] = (Imported.__module__, Imported.__name__)
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
