"""How an engine begins and ends: phases of its start, plans that cannot be right, stops."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from pagebus.actors.executor.device.errors import EngineError, PlanError
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import SettingsError
from pagebus.bus.messages import StepPlan
from tests.actors.executor.small_engine import SETTINGS
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (StepPlan(step=3, planned_s=0.0, num_decodes=0), "step 3 came after step 1"),
        (StepPlan(step=2, planned_s=0.0, num_decodes=0, freed_slots=ints([3])), "step 2 .* slot 3, which is empty"),
    ],
    ids=["gap", "bad plan"],
)
def test_a_plan_that_cannot_be_right_ends_the_engine(folder: Path, second: StepPlan, text: str) -> None:
    """The owner is told once, with the reason; steps before it are answered, plans after it are refused."""
    driver = Driver(folder, **SETTINGS)
    driver.scheduler()
    driver.run_plan(StepPlan(step=1, planned_s=0.0, num_decodes=0))

    with pytest.raises(PlanError, match=text):
        driver.run_plan(second)
    with pytest.raises(EngineError, match="the engine has ended"):
        driver.engine.submit(second, driver.epoch)
    driver.close()
    assert driver.results.empty()


def test_a_failed_engine_builds_no_more_grammars(folder: Path) -> None:
    """Its process would wait, when it ends, for all that are still to be built."""
    before = set(threading.enumerate())
    driver = Driver(folder, **SETTINGS)
    scheduler = driver.scheduler()
    scheduler.add([1, 2, 3], 4, grammar='start: "a"', end_token_ids=(4,))
    driver.drive(scheduler)
    builders = [each for each in set(threading.enumerate()) - before if each.name.startswith("grammar")]
    assert builders
    with pytest.raises(PlanError):
        driver.run_plan(StepPlan(step=scheduler.step + 2, planned_s=0.0, num_decodes=0))
    driver.close()
    for each in builders:
        each.join(LIMIT_S)
        assert not each.is_alive()


def test_a_cache_too_small_for_one_sequence_is_refused(folder: Path) -> None:
    """Before anything is loaded, and with the length that would fit."""
    settings = SETTINGS | {"num_gpu_blocks_override": 9}
    with pytest.raises(SettingsError, match=r"160 tokens .* fits is 144; .* --num-gpu-blocks-override"):
        Driver(folder, **settings)


def test_missing_weights_fail_the_start(folder: Path, tmp_path: Path) -> None:
    """The future that start() gives carries the model's error."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(Exception, match="safetensors"):
        Driver(tmp_path, **SETTINGS)


def test_stop_finishes_what_is_queued(folder: Path, prompts: list[list[int]]) -> None:
    """All plans that were handed over are answered before the threads end."""
    driver = Driver(folder, **SETTINGS)
    scheduler = driver.scheduler()
    for prompt in prompts[:4]:
        scheduler.add(prompt, 4)
    for _ in range(5):
        plan = scheduler.plan()
        assert plan is not None
        driver.engine.submit(plan, driver.epoch)

    assert driver.engine.stop()

    assert [driver.result().step for _ in range(5)] == [1, 2, 3, 4, 5]
    assert driver.engine.stop()


def test_progress_names_the_phases_in_order(folder: Path) -> None:
    """The device, weights, kernels, the cache, then graphs (warm-up), which ends at 1."""
    driver = Driver(folder, **SETTINGS)
    driver.close()

    assert list(dict.fromkeys(phase for phase, _ in driver.phases)) == [
        "device", "weights", "kernels", "kv cache", "graphs",
    ]  # fmt: skip
    assert driver.phases[-1] == ("graphs", 1.0)
    assert driver.info.num_blocks == 60
    assert driver.info.vocab_size == ModelConfig.load(folder).vocab_size


def test_dummy_weights_need_no_file(folder: Path, tmp_path: Path) -> None:
    """Shapes are enough to run and measure."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    driver = Driver(tmp_path, **SETTINGS, load_format="dummy")
    scheduler = driver.scheduler()
    sequence = scheduler.add([1, 2, 3], 4)

    driver.drive(scheduler)
    driver.close()

    assert len(sequence.output) == 4
    assert np.isfinite(driver.engine.stats.busy_s)
    assert driver.engine.stats.steps == scheduler.step
