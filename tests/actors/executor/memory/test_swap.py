"""Copies between the tiers: content, order against steps, limits, and tokens that do not change."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.memory import host_memory, swap
from pagebus.actors.executor.memory.host_memory import HostMemory, num_host_blocks
from pagebus.bus.messages import StepPlan
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 96, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 12,
}  # fmt: skip
MAX_TOKENS = 12
CPU = torch.device("cpu")


def copies_plan(step: int, out: list[tuple[int, int]] | None = None, back: list[tuple[int, int]] | None = None, **more):
    """A plan with copies: (device, host) pairs out, (host, device) pairs back."""
    out, back = out or [], back or []
    return StepPlan(
        step=step, planned_s=0.0, num_decodes=0,
        swap_out_blocks=ints([a for a, _ in out]), swap_out_hosts=ints([b for _, b in out]),
        swap_in_hosts=ints([a for a, _ in back]), swap_in_blocks=ints([b for _, b in back]), **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[3])


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


def make_prompts(count: int = 10) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(300) for _ in range(rng.choice((3, 16, 17, 40, 70)))] for _ in range(count)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_swapped_sequences_give_the_same_tokens(driver: Driver, folder: Path, depth: int, caching: bool) -> None:
    """Ten sequences over twelve blocks, with swap alone: each token is transformers'."""
    prompts = make_prompts()
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    core = CoreDriver(driver, depth=depth, preemption_mode="swap", enable_prefix_caching=caching)
    answers = [core.send(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]

    core.run()

    assert [answer.tokens for answer in answers] == expected
    swapped = [each for each in core.preempted if each.swapped]
    assert swapped
    assert core.replica.host_tier.num_in > 0
    assert not any(core.core.leftovers().values())


def test_a_host_tier_hit_computes_only_the_rest(driver: Driver, folder: Path) -> None:
    """A prompt whose blocks fell out of the device tier is loaded, all but its last block."""
    prompts = [*make_prompts(8), list(range(90, 160))]
    core = CoreDriver(driver, preemption_mode="swap")
    first = core.send("first", prompts[-1], 4)
    core.run()
    for i, prompt in enumerate(prompts[:-1]):
        core.send(f"r{i}", prompt, 4)
        core.run()
    hits = core.replica.host_tier.num_hits

    second = core.send("second", prompts[-1], 4)
    core.run()

    assert second.tokens == first.tokens == reference_generate(folder, [prompts[-1]], 4)[0]
    assert core.replica.host_tier.num_hits - hits > 0
    assert second.cached == 64


def test_the_lease_tells_sizes_and_rates(driver: Driver) -> None:
    """What the scheduler's cost model needs."""
    info = driver.info
    assert info.num_host_blocks == driver.engine.num_host_blocks > 100
    assert info.block_bytes * info.num_host_blocks <= 4 << 30
    assert info.copy_bytes_per_s > 0
    assert info.prefill_tokens_per_s > 0


def test_without_swap_space_there_is_no_host_tier(folder: Path) -> None:
    """Where no blocks move either, nothing is measured; and copies are refused."""
    driver = Driver(folder, **SETTINGS, swap_space=0, kv_moves="off")
    driver.scheduler()
    assert (driver.info.num_host_blocks, driver.info.copy_bytes_per_s, driver.info.prefill_tokens_per_s) == (0, 0, 0)
    with pytest.raises(PlanError, match=r"step 1 .* swap_out_hosts holds 0"):
        driver.run_plan(copies_plan(1, out=[(1, 0)]))
    driver.close()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (copies_plan(1, out=[(12, 0)]), "swap_out_blocks holds 12"),
        (copies_plan(1, back=[(0, -1)]), "swap_in_blocks holds -1"),
        (copies_plan(1, back=[(2**31 - 1, 0)]), "swap_in_hosts holds"),
        (StepPlan(step=1, planned_s=0.0, num_decodes=0, swap_in_hosts=ints([1])), "swap_in_hosts has 1 entries"),
    ],
    ids=["device", "negative", "host", "lengths"],
)
def test_copies_of_blocks_that_do_not_exist_are_refused(plan: StepPlan, text: str) -> None:
    """Before anything is touched."""
    copies = swap.make_copies(torch.zeros(12, 4), HostMemory(5, 16, CPU))
    with pytest.raises(PlanError, match=text):
        copies.apply(plan)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_no_block_lies_in_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are apart, and inside the chunk whose pages are locked together."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 10_000)
    memory = HostMemory(9, 3000, CPU)
    starts = memory.addresses(np.arange(9, dtype=np.int32)).tolist()

    assert all(b - a >= 3000 for a, b in itertools.pairwise(starts))
    assert all((start - starts[0]) % 12288 <= 12288 - 3000 for start in starts)
    for index in range(9):
        memory.block(index)[:] = index
    assert [int(memory.block(index).min()) for index in range(9)] == list(range(9))
    assert memory.block(4).ctypes.data == starts[4]


def test_the_space_is_what_was_asked_for_but_leaves_some() -> None:
    """At most half of the memory that is left."""
    free = 10 << 30
    assert num_host_blocks(4.0, 1 << 20, free) == 4096
    assert num_host_blocks(64.0, 1 << 20, free) == 5 * 1024
    assert num_host_blocks(0.0, 1 << 20, free) == 0
    assert num_host_blocks(4.0, 1 << 20, -1) == 0


# -- order, on a CUDA made of paper -----------------------------------------------------------------------------------


class PaperEvent:
    done = False

    def __init__(self) -> None:
        self.recorded_on: object = None

    def record(self, stream: object = None) -> None:
        self.recorded_on = stream or "compute"

    def query(self) -> bool:
        return self.done


class PaperStream:
    cuda_stream = 0

    def __init__(self) -> None:
        self.waits: list[PaperEvent] = []

    def wait_event(self, event: PaperEvent) -> None:
        self.waits.append(event)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> tuple[swap.StreamCopies, PaperStream, PaperStream]:
    """(copies of 20 blocks, their stream, the compute stream); copies move bytes at once, events never happen."""

    def move(target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        return 0

    copying, computing = PaperStream(), PaperStream()
    monkeypatch.setattr(swap, "new_event", PaperEvent)
    monkeypatch.setattr(swap, "new_stream", lambda device: copying)
    monkeypatch.setattr(swap, "_driver_copies", lambda load: (move, move))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    cache = torch.arange(20 * 4, dtype=torch.int32).view(20, 4)
    return swap.StreamCopies(cache, HostMemory(20, 16, CPU)), copying, computing


def test_copies_follow_earlier_steps_and_move_whole_blocks(paper) -> None:
    """The copy stream waits for what was computed; then blocks go out and, to other places, back in."""
    copies, copying, computing = paper
    cache = copies._cache

    behind = copies.apply(copies_plan(1, out=[(2, 7), (3, 8)], back=[(7, 10)]))

    assert [event.recorded_on for event in copying.waits] == ["compute"]
    assert behind.recorded_on is copying
    assert computing.waits == []
    assert cache[10].tolist() == cache[2].tolist() == [8, 9, 10, 11]
    assert copies.memory.block(8).view(np.int32).tolist() == [12, 13, 14, 15]


def test_only_steps_that_touch_copied_blocks_wait(paper) -> None:
    """And they wait once, for as little as they need: groups of copies end one after another."""
    copies, _, computing = paper
    size = swap.COPIES_PER_EVENT
    copies.apply(copies_plan(1, out=[(block, block) for block in range(2 * size)]))
    first, second = (event for _, event in copies._pending)

    copies.apply(StepPlan(step=2, planned_s=0.0, num_decodes=0, appended_blocks=ints([15])))
    assert computing.waits == []
    copies.apply(StepPlan(step=3, planned_s=0.0, num_decodes=0, appended_blocks=ints([15, 0])))
    assert computing.waits == [first]
    copies.apply(StepPlan(step=4, planned_s=0.0, num_decodes=0, new_block_ids=ints([1, 2])))
    assert computing.waits == [first]
    copies.apply(StepPlan(step=5, planned_s=0.0, num_decodes=0, copy_sources=ints([size])))
    assert computing.waits == [first, second]
    copies.apply(copies_plan(6, back=[(1, 0)], new_block_ids=ints([0])))
    assert computing.waits == [first, second, copies._pending[-1][1]]


def test_nobody_waits_for_copies_that_are_done(paper) -> None:
    """Their events are forgotten."""
    copies, _, computing = paper
    copies.apply(copies_plan(1, out=[(1, 1)]))
    copies._pending[0][1].done = True

    copies.apply(StepPlan(step=2, planned_s=0.0, num_decodes=0, appended_blocks=ints([1])))

    assert computing.waits == []
    assert not copies._pending


def test_the_watch_tells_up_to_which_step_copies_are_done() -> None:
    """Steps without copies are done with the ones before them."""
    watch, early, late = swap.CopyWatch(), PaperEvent(), PaperEvent()
    assert watch.step_done(1, None) == 1
    assert watch.step_done(2, early) == 1
    assert watch.step_done(3, late) == 1
    early.done = True
    assert watch.step_done(4, None) == 2
    late.done = True
    assert watch.step_done(5, None) == 5


@pytest.mark.parametrize("steps_before", [900, 3, 1])
def test_copies_for_an_earlier_scheduler_come_first(steps_before: int) -> None:
    """Until they are done, none of the new one's are, however many steps the earlier one has had."""
    watch, early, late = swap.CopyWatch(), PaperEvent(), PaperEvent()
    assert watch.step_done(steps_before, early) == steps_before - 1
    assert watch.step_done(1, None) == 0
    assert [watch.step_done(step, late if step == 2 else None) for step in range(2, 6)] == [0, 0, 0, 0]
    early.done = True
    assert watch.step_done(6, None) == 1
    late.done = True
    assert watch.step_done(7, None) == 7
