"""The engine on a CPU, driven by hand: exact tokens, pipelining, slots, ends, failures."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.executor import engine, loading
from actors.executor.buckets import Bucket, Buckets
from actors.executor.errors import EngineError, PlanError
from actors.executor.graphs import Graphs, padded_pass
from actors.executor.layers.attention import KernelPass
from actors.executor.models import Piece
from actors.executor.pieces import Pieces
from actors.executor.runner import Runner
from actors.executor.step_work import StepWork
from actors.executor.upload import Uploader
from actors.model_config import ModelConfig
from actors.settings import Settings, SettingsError
from bus.messages import END_LENGTH, END_STOP, StepPlan, StepResult
from kernels.attention_library import LongRow
from kernels.paged_attention import AttentionShape
from tests.engine_driver import Driver, Grown, HandScheduler, ints, new_sequence
from tests.model_factory import REFERENCE_CONFIGS, ReferenceConfig, make_reference, reference_generate

MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 160, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60,
}  # fmt: skip


def make_prompts(vocab_size: int, count: int = 10, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[3])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(REFERENCE_CONFIGS[3].vocab_size)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference_generate(folder, prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


def outputs(driver: Driver, scheduler: HandScheduler, prompts: list[list[int]], depth: int = 2) -> list[list[int]]:
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
    driver.drive(scheduler, depth)
    assert driver.engine.num_occupied_slots == 0
    return [sequence.output for sequence in sequences]


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
        def __init__(self, settings: Settings, runner: Runner) -> None:
            self.left = 3

        def __len__(self) -> int:
            return self.left

        def take(self, rows: tuple[LongRow, ...]) -> bool:
            return True

        def prepare_next(self) -> None:
            prepared.append(threading.get_ident())
            self.left -= 1
            if not self.left:
                all_done.set()

    monkeypatch.setattr(loading, "LongPrompts", Shapes)
    monkeypatch.setattr(engine, "IDLE_S", 0.001)
    driver = Driver(folder, **SETTINGS)
    assert all_done.wait(5.0)
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


class EagerGraphs(Graphs):
    """Runs what the graph of a bucket holds, instead of the graph, with garbage wherever no input of the step is."""

    def __init__(self, buckets: Buckets) -> None:
        super().__init__(buckets)
        self.replayed: set[Bucket] = set()

    def bucket(self, work: StepWork) -> Bucket | None:
        return self.buckets.fitting(work)

    def replay(self, runner: Runner, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        self.replayed.add(bucket)
        for inputs in (runner._input_ids, runner._positions, runner._slot_mapping, runner._context_lens):
            inputs.fill_(10**6)
        return padded_pass(runner, bucket)


@pytest.fixture
def padded(driver: Driver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EagerGraphs:
    """The driver's engine runs padded steps of up to 6 rows and 40 tokens, with decodes apart unless told otherwise."""
    runner, apart = driver.engine._loaded.runner, getattr(request, "param", True)
    buckets = Buckets(6, 40, 4, decodes_apart=apart)
    monkeypatch.setattr(driver.engine._loaded.batch, "_decodes_apart", apart)
    limits = runner.limits
    uploader = Uploader(torch.device("cpu"), limits.max_num_seqs, 4096, 1, max_spans=buckets.largest().spans)
    graphs = EagerGraphs(buckets)
    monkeypatch.setattr(runner, "buckets", buckets)
    monkeypatch.setattr(runner, "uploader", uploader)
    monkeypatch.setattr(runner, "graphs", graphs)
    monkeypatch.setattr(runner.model, "_begin", partial(KernelPass, runner._ops, AttentionShape(4, 2, 32, 4)))
    return graphs


@pytest.mark.parametrize(("budget", "padded"), [(3, True), (16, True), (24, False), (40, True)], indirect=["padded"])
def test_padded_steps_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int
) -> None:
    """What a CUDA graph computes for a bucket is right for the decodes and prompts it is padded from."""
    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert {bucket.spans > 0 for bucket in padded.replayed} == {True, budget == 24}


def test_padded_steps_with_extras_and_scores_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """Rows that are sampled again, log probabilities of outputs and of prompts, beside plain rows."""

    def run() -> list[tuple[list[int], list[float]]]:
        scheduler, bits = driver.scheduler(24), {}
        kinds: list[dict[str, Any]] = [
            {}, {"logit_bias": {7: 3.0}, "temperature": 0.5, "top_k": 9}, {"logprobs": 2}, {"prompt_logprobs": 1}
        ]  # fmt: skip
        crowd = [scheduler.add(prompt, MAX_TOKENS, **kinds[i % 4]) for i, prompt in enumerate(prompts)]

        def collect(result: StepResult) -> None:
            for row, value in zip(
                result.logprob_rows.tolist(), result.logprob_bits.view(np.float32).tolist(), strict=True
            ):
                bits.setdefault(int(result.sequence_ids[row]), []).append(value)

        driver.drive(scheduler, on_result=collect)
        return [(sequence.output, bits.get(sequence.sequence_id, [])) for sequence in crowd]

    plain = run()
    graphs = request.getfixturevalue("padded")
    again = run()

    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in plain]
    for (_, scores), (_, wanted) in zip(again, plain, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-4)
    assert any(bucket.spans for bucket in graphs.replayed)


class EagerPieces(EagerGraphs):
    """Runs every step with prompts in pieces, padded to ``SIZE`` tokens: each is computed where its graph would be."""

    SIZE = 64

    def bucket(self, work: StepWork) -> Bucket | None:
        return None if work.decode_only else Bucket(0, self.SIZE, pieces=True)

    def piece(self, runner: Runner, bucket: Bucket, num_tokens: int) -> Piece:
        self.replayed.add(bucket)
        model, config, size = runner.model, runner.model.config, bucket.tokens
        residual = torch.full((size, config.hidden_size), torch.nan)
        queries = torch.full((size, config.num_heads, config.head_dim), torch.nan)

        class Computed:
            """Leaves behind what the graph of a layer's piece does."""

            def __init__(self, index: int) -> None:
                self.index = index

            def replay(self) -> None:
                given = residual if self.index else None
                for kept, found in zip(
                    (residual, queries), model.piece(self.index, given, None, runner.tokens(size)), strict=True
                ):
                    kept.copy_(found)

        graphs = [Computed(index) for index in range(config.num_layers)]
        return Pieces(graphs, residual, [queries] * len(graphs)).of(num_tokens)


@pytest.mark.parametrize("budget", [5, 17, 64])
def test_steps_in_pieces_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What lies between attentions may be padded, with garbage behind the tokens of rows of any kind."""
    runner = driver.engine._loaded.runner
    pieces = EagerPieces(runner.buckets)
    monkeypatch.setattr(runner, "graphs", pieces)

    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert pieces.replayed == {Bucket(0, pieces.SIZE, pieces=True)}


# -- failures ---------------------------------------------------------------------------------------------------------


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


def test_settings_decide_device_and_format() -> None:
    """``auto`` on a machine without CUDA is the CPU and float32."""
    from actors.executor.device import resolve_device, resolve_dtype, resolve_token_budget

    device = resolve_device(Settings(device="cpu"))

    assert str(resolve_dtype(Settings(), "bfloat16", device)) == "torch.float32"
    assert str(resolve_dtype(Settings(dtype="half"), "bfloat16", device)) == "torch.float16"
    assert resolve_token_budget(Settings(), device) == 2048


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"attention_backend": "triton"}, "--attention-backend triton"), ({"deterministic": True}, "--deterministic")],
)
def test_attention_of_a_gpu_is_refused_on_a_cpu(settings: dict[str, Any], message: str) -> None:
    """What only CUDA can do names its flag; torch is what a CPU computes with anyway."""
    from actors.executor.device import check_attention

    check_attention(Settings(attention_backend="torch"), torch.device("cpu"))
    check_attention(Settings(**settings), torch.device("cuda"))
    with pytest.raises(SettingsError, match=message):
        check_attention(Settings(**settings), torch.device("cpu"))
