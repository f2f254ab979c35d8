"""The engine on a CPU, driven by hand: exact tokens, pipelining, slots, ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pagebus.actors.executor import engine
from pagebus.actors.executor.loading import loading
from pagebus.actors.executor.step.runner import Runner
from pagebus.bus.messages import END_LENGTH, END_STOP, StepPlan, StepResult
from pagebus.kernels.attention.cudnn_prefill import LongRow
from tests.actors.executor.small_engine import MAX_TOKENS, SETTINGS, make_prompts, outputs
from tests.helpers.engine_driver import Driver, Grown, ints, new_sequence
from tests.helpers.model_factory import REFERENCE_CONFIGS, ReferenceConfig, make_reference, reference_generate
from tests.helpers.waiting import LIMIT_S

pytestmark = pytest.mark.share(6)


@pytest.mark.parametrize("config", REFERENCE_CONFIGS, ids=lambda config: config.name)
def test_greedy_tokens_equal_transformers(config: ReferenceConfig, tmp_path: Path) -> None:
    """Ten sequences over six slots, prompts in chunks of at most 32 tokens beside decodes: the exact tokens."""
    folder = make_reference(tmp_path, config)
    prompts = make_prompts(config.vocab_size, seed=config.seed)
    driver = Driver(folder, **SETTINGS)

    assert outputs(driver, driver.scheduler(32), prompts) == reference_generate(folder, prompts, MAX_TOKENS)
    driver.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("budget", [3, 16, 64])
def test_tokens_do_not_depend_on_chunks_and_depth(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], budget: int, depth: int
) -> None:
    """However prompts are cut and however many plans are in flight."""
    assert outputs(driver, driver.scheduler(budget, seed=budget), prompts, depth) == expected


def test_every_plan_gets_one_result_in_order(driver: Driver, prompts: list[list[int]]) -> None:
    """Steps are answered one by one, with times that make sense, and the last ends are by length."""
    scheduler = driver.scheduler()
    results: list[StepResult] = []
    sequences = [scheduler.add(prompt, 3) for prompt in prompts[:3]]

    driver.drive(scheduler, on_result=results.append)

    assert [result.step for result in results] == list(range(1, scheduler.step + 1))
    assert {result.scheduler_epoch for result in results} == {driver.epoch}
    assert all(result.received_s <= result.launched_s <= result.done_s for result in results)
    assert sum(result.num_computed_tokens for result in results) == sum(len(prompt) + 2 for prompt in prompts[:3])
    assert [sequence.end for sequence in sequences] == [END_LENGTH] * 3


def test_a_plan_without_rows_is_answered(driver: Driver) -> None:
    """It only frees, or not even that."""
    driver.scheduler()

    result = driver.run_plan(StepPlan(step=1, planned_s=0.0, num_decodes=0))

    assert (result.step, len(result.token_ids), result.num_computed_tokens) == (1, 0, 0)


def test_an_end_token_ends_the_sequence_and_frees_its_slot(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Each sequence ends with the first end token of its greedy output, with rows planned beyond it in flight."""
    scheduler = driver.scheduler()
    ends = [answer[4] for answer in expected]
    sequences = [
        scheduler.add(prompt, MAX_TOKENS, end_token_ids=(end, 10**6)) for prompt, end in zip(prompts, ends, strict=True)
    ]

    driver.drive(scheduler, depth=3)

    assert [sequence.output for sequence in sequences] == [
        answer[: answer.index(end) + 1] for answer, end in zip(expected, ends, strict=True)
    ]
    assert {sequence.end for sequence in sequences} == {END_STOP}


def test_a_preempted_sequence_goes_on_with_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Its prompt and its output so far are computed again, the next token is the one it would have had."""
    scheduler = driver.scheduler()
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts[:3]]
    while min(len(sequence.output) for sequence in sequences) < 5:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.process(driver.run_plan(plan))

    scheduler.preempt(sequences[1])
    driver.drive(scheduler)

    assert [sequence.output for sequence in sequences] == expected[:3]


def test_cached_and_copied_blocks_are_read_like_computed_ones(driver: Driver, folder: Path) -> None:
    """A sequence that finds two blocks of its prompt in the cache, one of them copied, computes only the rest."""
    prompt = make_prompts(300, 1, seed=9)[0] + list(range(40))
    expected = reference_generate(folder, [prompt], 3)[0]
    scheduler = driver.scheduler()
    scheduler.free_blocks = [block for block in scheduler.free_blocks if block not in (50, 51)]
    first = scheduler.add(prompt, 3)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.process(driver.run_plan(plan))
    second = Grown(2, prompt, 3, {}, slot=1, blocks=[first.blocks[0], 50, 51, 52, 53, 54], num_computed=32)

    answer = driver.run_plan(
        StepPlan(
            step=2,
            planned_s=0.0,
            num_decodes=0,
            new_sequences=(new_sequence(second),),
            new_token_ids=ints(prompt),
            new_block_ids=ints(second.blocks),
            copy_sources=ints([first.blocks[1]]),
            copy_targets=ints([50]),
            slots=ints([1]),
            num_scheduled=ints([len(prompt) - 32]),
        )
    )

    assert answer.num_computed_tokens == len(prompt) - 32
    assert [first.output[0], answer.token_ids.tolist()[0]] == [expected[0]] * 2


def test_idle_moments_are_for_long_prompts(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan one shape is made ready after the other; plans that come then run as ever."""
    prepared: list[int] = []
    all_done = threading.Event()

    class Shapes:
        def __init__(self, runner: Runner) -> None:
            self.left = 3

        def __len__(self) -> int:
            return self.left

        def parts(self, rows: tuple[LongRow, ...], decodes: bool) -> tuple[LongRow, ...]:
            return ()

        def spare(self, plan_s: float) -> None:
            """Plans cost nothing."""

        def prepare_next(self) -> None:
            prepared.append(threading.get_ident())
            self.left -= 1
            if not self.left:
                all_done.set()

    monkeypatch.setattr(loading, "PrefillBackend", Shapes)
    monkeypatch.setattr(engine, "IDLE_S", 0.001)
    driver = Driver(folder, **SETTINGS)
    assert all_done.wait(LIMIT_S)
    assert prepared == [driver.engine._threads[0].ident] * 3
    assert outputs(driver, driver.scheduler(), prompts) == expected
    driver.close()


def test_a_new_scheduler_finds_an_empty_batch(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """What an older scheduler left running is forgotten with its first plan."""
    left = driver.scheduler()
    for prompt in prompts[:6]:
        left.add(prompt, MAX_TOKENS)
    plan = left.plan()
    assert plan is not None
    driver.run_plan(plan)

    assert outputs(driver, driver.scheduler(), prompts) == expected


def test_a_full_batch_of_the_longest_sequences(folder: Path) -> None:
    """Every sequence may grow to max_model_len; the last token needs no block and no place."""
    driver = Driver(folder, **SETTINGS | {"max_model_len": 33, "max_num_seqs": 3})
    scheduler = driver.scheduler()
    prompts = make_prompts(300, 1, seed=4) * 3
    sequences = [scheduler.add(prompt[:20] or [1], 33 - len(prompt[:20] or [1])) for prompt in prompts]

    driver.drive(scheduler, depth=3)

    assert [len(sequence.prompt) + len(sequence.output) for sequence in sequences] == [33] * 3
    driver.close()
