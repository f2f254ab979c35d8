"""Engines that use each other's blocks, and what they say of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.loading.limits import cache_format
from pagebus.actors.executor.memory.kind import kind_of_blocks
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.opening import shares_host_tier
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.settings import Settings
from pagebus.bus.messages import BlockPull, PullReport, StepPlan, StepResult
from tests.actors.executor.small_engine import MAX_TOKENS, SETTINGS
from tests.helpers.engine_driver import Driver, Grown, HandScheduler, ints, new_sequence
from tests.helpers.model_factory import reference_generate

PROMPT = [(7 * each + each * each) % 300 for each in range(70)]
"""Four whole blocks and a part of one."""
COMPUTED = 64


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[Driver]:
    """A second engine of the same model."""
    made = Driver(folder, **SETTINGS)
    yield made
    made.close()


def compute(driver: Driver) -> list[int]:
    """The blocks in which an engine has the prompt."""
    scheduler = driver.scheduler()
    sequence = scheduler.add(PROMPT, 1)
    while sequence.num_computed < len(PROMPT):
        plan = scheduler.plan()
        assert plan is not None
        blocks = list(sequence.blocks)
        driver.run_plan(plan)
    return blocks[: COMPUTED // 16]


def pull(driver: Driver, step: int, address: str, sources: list[int], targets: list[int]) -> PullReport:
    """Have an engine pull blocks; its report."""
    order = BlockPull(pull=3, address=address, num_blocks=len(sources))
    plan = StepPlan(
        step=step, planned_s=0.0, num_decodes=0, pulls=(order,), pull_sources=ints(sources), pull_blocks=ints(targets)
    )
    driver.engine.submit(plan, driver.epoch)
    told: list[Any] = [driver.result(), driver.result()]
    (report,) = [each for each in told if isinstance(each, PullReport)]
    (result,) = [each for each in told if isinstance(each, StepResult)]
    assert result.step == step
    return report


def go_on(driver: Driver, scheduler: HandScheduler, blocks: list[int], unsaid: int = 0) -> list[int]:
    """The output of the prompt, of which an engine has blocks; so many of its first tokens are not said."""
    scheduler.free_blocks = [each for each in scheduler.free_blocks if each not in blocks]
    rest = [scheduler.free_blocks.pop() for _ in range(2)]
    sequence = Grown(1, PROMPT, MAX_TOKENS, {}, slot=0, blocks=[*blocks, *rest], num_computed=COMPUTED)
    scheduler.all[1] = sequence
    scheduler.free_slots.remove(0)
    scheduler.step += 1
    plan = StepPlan(
        step=scheduler.step,
        planned_s=0.0,
        num_decodes=0,
        new_sequences=(replace(new_sequence(sequence), first_token=unsaid),),
        new_token_ids=ints(PROMPT[unsaid:]),
        new_block_ids=ints(sequence.blocks),
        slots=ints([0]),
        num_scheduled=ints([len(PROMPT) - COMPUTED]),
    )
    sequence.num_tokens, sequence.num_computed = len(PROMPT) + 1, len(PROMPT)
    scheduler.running.append(sequence)
    scheduler.process(driver.run_plan(plan))
    driver.drive(scheduler)
    return sequence.output


def test_an_engine_goes_on_with_blocks_of_another(folder: Path, driver: Driver, other: Driver) -> None:
    """With the tokens that one engine alone gives; without the pull they would be others."""
    sources = compute(driver)
    expected = reference_generate(folder, [PROMPT], MAX_TOKENS)[0]

    scheduler, targets = other.scheduler(), [50, 11, 12, 30]
    scheduler.step = 1
    assert pull(other, 1, driver.info.kv_address, sources, targets).there
    assert go_on(other, scheduler, targets) == expected

    scheduler = other.scheduler()
    assert go_on(other, scheduler, targets, unsaid=COMPUTED) == expected

    scheduler = other.scheduler()
    assert go_on(other, scheduler, [1, 2, 3, 4]) != expected


def test_a_pull_that_fails_ends_nothing(driver: Driver, other: Driver) -> None:
    """The engine says so, and runs the next plan."""
    other.scheduler()
    assert "59" in pull(other, 1, driver.info.kv_address.replace('"num_blocks":60', '"num_blocks":59'), [59], [1]).error
    assert other.run_plan(StepPlan(step=2, planned_s=0.0, num_decodes=0)).step == 2


def test_executors_of_one_deployment_have_one_kind(driver: Driver, other: Driver) -> None:
    """And addresses of their own."""
    assert driver.info.kv_kind == other.info.kv_kind != ""
    assert driver.info.kv_address != other.info.kv_address
    told = Address.parse(driver.info.kv_address)
    assert (told.block_bytes, told.num_blocks) == (driver.info.block_bytes, driver.info.num_blocks)
    assert told.secret == ""


def test_logs_do_not_have_the_address(driver: Driver) -> None:
    """It may hold a secret."""
    assert driver.info.for_logs() == {
        name: value for name, value in asdict(driver.info).items() if name != "kv_address"
    }


@pytest.mark.parametrize(
    ("device", "change", "shares"),
    [
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cuda", {"executors": 2}, True),
        ("cuda", {"kv_moves": "network"}, True),
        ("cpu", {"kv_moves": "off"}, False),
    ],
)
def test_who_shares_its_host_tier(folder: Path, device: str, change: dict[str, Any], shares: bool) -> None:
    """With a GPU only who may have neighbours."""
    settings = Settings(model=str(folder), **change)
    assert shares_host_tier(settings, ModelConfig.load(folder), torch.device(device)) == shares


@pytest.mark.parametrize("change", [{"kv_moves": "off"}, {"enable_prefix_caching": False}])
def test_blocks_that_do_not_move(folder: Path, change: dict[str, Any]) -> None:
    """Nothing is said of them, and a plan with pulls is an error."""
    made = Driver(folder, **SETTINGS, **change)
    made.scheduler()
    assert (made.info.kv_kind, made.info.kv_address, made.info.kv_host) == ("", "", "")
    plan = StepPlan(
        step=1, planned_s=0.0, num_decodes=0, pulls=(BlockPull(pull=1, address="", num_blocks=1),),
        pull_sources=ints([1]), pull_blocks=ints([1]),
    )  # fmt: skip
    with pytest.raises(PlanError, match="do not move"):
        made.run_plan(plan)
    made.close()


def test_a_server_listens_where_it_is_wanted(folder: Path) -> None:
    """On this host's address towards the bus."""
    made = Driver(folder, **SETTINGS, kv_moves="network")
    told = Address.parse(made.info.kv_address)
    made.close()
    assert told.name == "127.0.0.1"
    assert told.port
    assert len(told.secret) == 64


def test_what_changes_blocks_changes_their_kind(folder: Path, driver: Driver) -> None:
    """The model's files, the settings that count, the device; nothing else does."""

    cached = cache_format(driver.settings, ModelConfig.load(folder), torch.float32, None)

    def kind(device: str = "cpu", head: Path | None = None, **changes: Any) -> bytes:
        return kind_of_blocks(Settings(model=str(folder), **changes), folder, head, cached, device)

    assert kind() == kind(max_num_seqs=3, kv_moves="network", threads=1)
    others = [kind("cuda"), kind(seed=5), kind(head=folder / "config.json"), kind(load_format="dummy")]
    assert len({kind(), *others}) == 5


def test_blocks_of_ranks_are_of_the_kind_of_the_whole_model(folder: Path) -> None:
    """Unless the number of ranks shows in them."""
    whole = ModelConfig.load(folder)
    parts = [whole, local_config(whole, 0, 2), local_config(whole, 1, 2)]

    def kinds(**changes: Any) -> set[bytes]:
        asked = Settings(model=str(folder), **changes)
        formats = [cache_format(asked, part, torch.float32, None) for part in parts]
        return {kind_of_blocks(asked, folder, None, each, "cpu") for each in formats}

    assert len(kinds()) == len(kinds(kv_cache_dtype="fp8", calculate_kv_scales=False)) == 1
    assert len(kinds(deterministic=True)) == len(kinds(kv_cache_dtype="fp8")) == len(parts)
