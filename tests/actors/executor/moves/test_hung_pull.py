"""A copy out of another executor's memory that never returns: the executor ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.device.errors import EngineStalled
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import BlockPull
from tests.actors.executor.test_actor import empty_plan, settings, world
from tests.helpers.engine_driver import ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import LIMIT_S


async def test_an_executor_whose_pull_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps go on meanwhile."""
    monkeypatch.setattr("pagebus.actors.executor.actor.STALL_LOOK_S", 0.01)
    over = threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        over.wait(LIMIT_S)

    monkeypatch.setattr(Source, "copy", hang)
    monkeypatch.setattr(ExecutorActor, "_end_process_if_faulted", lambda self, error: over.set())
    folder = make_reference(tmp_path / "model", REFERENCE_CONFIGS[0])
    async with world(settings(folder, executors=2, step_timeout_s=1)) as running:
        info = await running.until_state("ready")
        order = BlockPull(pull=1, address=info["kv_address"], num_blocks=1, hosts=True)
        pulls = replace(empty_plan(), pulls=(order,), pull_sources=ints([3]), pull_blocks=ints([2]))
        await running.send(pulls, epoch=1)
        await running.send(empty_plan(2), epoch=1)
        assert [(await running.result()).step for _ in range(2)] == [1, 2]
        with pytest.raises(EngineStalled, match="blocks of another executor have been on their way for 1 s"):
            await running.ended()
