"""Groups of ranks that use each other's blocks: each rank its part of every block, from whoever has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.bus.messages import BlockPull, PullReport, StepPlan, StepResult
from tests.actors.executor.moves.test_engines import PROMPT, compute, go_on
from tests.actors.executor.small_engine import MAX_TOKENS, SETTINGS
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import make_golden
from tests.helpers.ranks.rank_driver import RankDriver

pytestmark = pytest.mark.share(6)

SMALL = SETTINGS | {"swap_space": 0.001, "executors": 2}
TARGETS = [50, 11, 12, 30]
LLAMA: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = next(each.golden["deepseek-v2-lite"] for each in FAMILIES if "deepseek-v2-lite" in each.golden)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "four heads": ("llama", LLAMA | {"num_key_value_heads": 4}, {}),
    "int8": ("llama", LLAMA, {"kv_cache_dtype": "int8"}),
    "one head, on both": ("llama", LLAMA | {"num_key_value_heads": 1}, {}),
    "one and two heads": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, {}),
    "latents, on both": ("deepseek_v2", LATENT, {}),
}


def group(folder: Path, world: int, **settings: Any) -> Driver:
    """An executor of so many ranks."""
    return Driver(folder, **settings) if world == 1 else RankDriver(folder, world, **settings)


def answer(driver: Driver) -> list[int]:
    """What an executor makes of the prompt that computes all of it."""
    scheduler = driver.scheduler()
    sequence = scheduler.add(PROMPT, MAX_TOKENS)
    driver.drive(scheduler)
    return sequence.output


def pull(driver: Driver, address: str, sources: list[int], *, hosts: bool = False) -> list[PullReport]:
    """Have an executor's first plan pull blocks; what its ranks report, in their order."""
    order = BlockPull(pull=3, address=address, num_blocks=len(sources), hosts=hosts)
    plan = StepPlan(
        step=1, planned_s=0.0, num_decodes=0, pulls=(order,), pull_sources=ints(sources),
        pull_blocks=ints(TARGETS[: len(sources)]),
    )  # fmt: skip
    driver.engine.submit(plan, driver.epoch)
    ranks = getattr(driver, "engines", [driver.engine])
    told: list[Any] = [driver.result() for _ in range(1 + len(ranks))]
    reports = sorted((each for each in told if isinstance(each, PullReport)), key=lambda each: each.rank)
    assert sum(isinstance(each, StepResult) for each in told) == 1
    return reports


@pytest.fixture(params=["int8", "one head, on both", "latents, on both"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and settings for it."""
    model_type, fields, settings = MODELS[request.param]
    return make_golden(tmp_path, model_type, fields), SMALL | settings


def test_a_group_goes_on_with_blocks_of_another(model: tuple[Path, dict[str, Any]]) -> None:
    """With the tokens that it computes alone; every rank has said that its part is there."""
    folder, settings = model
    check(folder, 2, 2, settings)


SIZES = {
    "of four by two, each out of two": ("four heads", 4, 2),
    "three heads, of one by two": ("one and two heads", 1, 2),
    "int8, of two by one": ("int8", 2, 1),
    "latents, of one by two": ("latents, on both", 1, 2),
}


@pytest.mark.parametrize(("name", "lenders", "targets"), SIZES.values(), ids=SIZES)
def test_a_group_goes_on_with_blocks_of_one_of_another_size(
    name: str, lenders: int, targets: int, tmp_path: Path
) -> None:
    """Each rank gets the heads that it has, from whoever has them."""
    model_type, fields, settings = MODELS[name]
    check(make_golden(tmp_path, model_type, fields), lenders, targets, SMALL | settings)


def check(folder: Path, lenders: int, targets: int, settings: dict[str, Any]) -> None:
    """Blocks of a group of so many ranks serve another as its own would."""
    with ExitStack() as stack:
        lender, target = (
            stack.enter_context(closing(group(folder, each, **settings))) for each in (lenders, targets)
        )  # fmt: skip
        assert lender.info.kv_kind == target.info.kv_kind != ""
        expected, sources = answer(target), compute(lender)
        scheduler = target.scheduler()
        scheduler.step = 1
        reports = pull(target, lender.info.kv_address, sources)
        assert [(each.rank, each.ranks, each.there, each.error) for each in reports] == [
            (rank, targets, True, "") for rank in range(targets)
        ]
        assert go_on(target, scheduler, TARGETS) == expected


def test_parts_come_out_of_host_tiers(pair: tuple[Driver, Driver]) -> None:
    """Of all ranks, under one number."""
    lender, target = pair
    expected, sources, hosts = answer(target), compute(lender), [5, 3, 8, 4]
    lender.scheduler()
    out = {"swap_out_blocks": ints(sources), "swap_out_hosts": ints(hosts)}
    lender.run_plan(StepPlan(step=1, planned_s=0.0, num_decodes=0, **out))
    scheduler = target.scheduler()
    scheduler.step = 1
    assert all(each.there for each in pull(target, lender.info.kv_address, hosts, hosts=True))
    assert go_on(target, scheduler, TARGETS) == expected


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    """Two groups of two ranks."""
    folder = make_golden(tmp_path_factory.mktemp("pair"), "llama", LLAMA)
    with ExitStack() as stack:
        lender, target = (stack.enter_context(closing(group(folder, 2, **SMALL))) for _ in range(2))
        yield lender, target


def test_a_group_tells_where_all_its_ranks_lie(pair: tuple[Driver, Driver]) -> None:
    """And which heads of keys and values each has."""
    for driver in pair:
        ranks = Address.parse(driver.info.kv_address).ranks
        assert len({each.file for each in ranks}) == len(ranks) == 2
        heads = [[(part.first, part.count) for part in each.parts] for each in ranks]
        assert heads == [[(0, 1)], [(1, 1)]]
        assert all(sum(part.num_bytes for part in each.parts) == each.block_bytes for each in ranks)
        assert driver.info.kv_host == ranks[0].host


def test_a_rank_whose_part_cannot_be_had_says_so(pair: tuple[Driver, Driver]) -> None:
    """The others have theirs."""
    lender, target = pair
    sources = compute(lender)
    second = Address.parse(lender.info.kv_address).ranks[1]
    target.scheduler()
    address = lender.info.kv_address.replace(second.nonce, "0" * 32)
    assert [each.there for each in pull(target, address, sources)] == [True, False]


def test_a_group_of_other_heads_lends_nothing(pair: tuple[Driver, Driver]) -> None:
    """What its address says is believed, and nothing else."""
    lender, target = pair
    target.scheduler()
    alone = Address.parse(lender.info.kv_address).ranks[0].text()
    reports = pull(target, alone, [1])
    assert [each.there for each in reports] == [True, False]
    assert "none of the source's 1 ranks has head 1" in reports[1].error
