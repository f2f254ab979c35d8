"""Adapters through the whole system: every token is that of the adapter's own model, whatever happens meanwhile.

The oracle is transformers with the adapter merged into the weights, in float32 and greedy; that of ``test_peft.py`` is
PEFT. Adapters are drawn so wide that no two of them agree for long.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from pagebus.actors.executor.adapters.places import Places
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AdapterSource
from tests.actors.executor.speculation.tiny_head import TinyHead
from tests.helpers.lora.adapters import ALL, greedy, make_adapter, merged, source_of
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.packers import PACKERS
from tests.helpers.waiting import LIMIT_S, eventually
from tests.system.harness import System, running

pytestmark = pytest.mark.share(6)

TOKENS = 12
Cases = list[tuple[AdapterSource | None, list[list[int]], list[list[int]]]]


def prompts(count: int, seed: int, length: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300) for _ in range(draw.randrange(3, length))] for _ in range(count)]


def family(tmp_path: Path, name: str) -> Path:
    found = next((each for each in FAMILIES if name in each.golden), None)
    if found is not None:
        return make_golden(tmp_path / "base", found.model_type, found.golden[name])
    return make_model(tmp_path / "base", name, seed=3)


def make_cases(base: Path, tmp_path: Path, count: int, *, asked: int = 2) -> Cases:
    """The model alone and ``count`` adapters, of mixed ranks, scales and targets, with prompts and what they give."""
    cases: Cases = [(None, prompts(asked, 0), greedy(merged(base, None), prompts(asked, 0), TOKENS))]
    for index in range(count):
        targets = [("q_proj", "v_proj"), ("o_proj", "down_proj", "gate_proj"), ALL][index % 3]
        folder = make_adapter(
            tmp_path / f"adapter-{index}", base, seed=index, rank=1 + index % 8, targets=targets,
            ranks={"q_proj": 3} if index % 2 else None, use_rslora=index % 4 == 1,
            alpha_pattern={"o_proj": 20} if index % 4 == 2 else {},
        )  # fmt: skip
        asked_for = prompts(asked, index % 2)  # some prompts are the same for several adapters
        cases.append((source_of(folder, base), asked_for, greedy(merged(base, folder), asked_for, TOKENS)))
    return cases


async def ask(system: System, cases: Cases) -> None:
    """All at once, in mixed order; every answer must be its adapter's."""
    wanted = [(case[0], prompt, answer) for case in cases for prompt, answer in zip(*case[1:], strict=True)]
    random.Random(5).shuffle(wanted)
    futures = [system.submit(prompt, adapter, max_tokens=TOKENS)[1] for adapter, prompt, _ in wanted]
    async with asyncio.timeout(LIMIT_S):
        got = await asyncio.gather(*futures)
    assert got == [answer for *_, answer in wanted]


@pytest.mark.parametrize("packer", ["fp8", "ct-int8", "gptq-4-act-order"])
async def test_quantized_weights(tmp_path: Path, packer: str) -> None:
    """The oracle is the model that the quantized weights mean, with the adapter merged into that."""
    quantized, dense = quantize(family(tmp_path, "llama2"), tmp_path, PACKERS[packer])
    cases = make_cases(dense, tmp_path, 3)
    async with running(quantized, partial(MemoryBus, MemoryServer()), enable_lora=True, max_loras=3) as system:
        await ask(system, cases)


@pytest.mark.parametrize(("method", "ranks"), [("ngram", 1), ("eagle3", 1), ("eagle3", 2), ("draft_model", 1)])
async def test_drafts(tmp_path: Path, method: str, ranks: int) -> None:
    """The model verifies drafts with their row's adapter; a head, or a small model, makes them for the model alone."""
    base = family(tmp_path, "qwen2")
    cases: Cases = []
    for source, asked, _ in make_cases(base, tmp_path, 3):
        repeated = [(prompt[:6] * 5)[:-index] for index, prompt in enumerate(asked, 1)]
        adapter = None if source is None else Path(source.path)
        cases.append((source, repeated, greedy(merged(base, adapter), repeated, TOKENS)))
    drafting: dict[str, object] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if method == "eagle3":
        drafting = {"spec_model": str(TinyHead(64, 307, (1, 0, 1)).save(tmp_path / "head"))}
    if method == "draft_model":
        drafting = {"spec_model": str(base)}
    options = {"enable_lora": True, "max_loras": 2, "spec_method": method, "spec_tokens": 4, **drafting}
    options["tensor_parallel_size"] = ranks
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        (replica,) = system.scheduler.core.replicas.values()
        assert replica.step_results.acceptance.num_draft_tokens > 0


async def test_fewer_places_than_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five adapters two may have sequences at a time, and the others wait, nobody for ever. With few blocks
    sequences are preempted and swapped, and adapters that nobody uses lose their blocks, and come again."""
    base = family(tmp_path, "qwen2")
    cases = make_cases(base, tmp_path, 5, asked=3)
    options = {
        "enable_lora": True, "max_loras": 2, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 22,
        "max_cpu_loras": 5,
        "max_model_len": 96, "preemption_mode": "swap", "swap_space": 0.01,
    }  # fmt: skip
    place, placed = Places.place, []
    monkeypatch.setattr(Places, "place", lambda *given: placed.append(given[1]) or place(*given))
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)
        assert system.scheduler.core.num_preemptions
        assert len(placed) > 5, "none has lost its blocks"


async def test_executor_and_scheduler_are_killed(tmp_path: Path) -> None:
    base = family(tmp_path, "llama2")
    cases = make_cases(base, tmp_path, 3)
    options = {"enable_lora": True, "max_loras": 2, "max_num_batched_tokens": 24, "lease_ttl_s": 1.0}
    async with running(base, partial(MemoryBus, MemoryServer()), executors=2, **options) as system:
        asking = asyncio.create_task(ask(system, cases))
        await system.until_tokens(10)
        await system.kill("executor-0")
        await system.until_tokens(40)
        await system.replace_scheduler()
        await asking
        system.num_executors = 1


async def test_a_reload_never_meets_blocks_of_the_version_before(tmp_path: Path) -> None:
    base = family(tmp_path, "llama2")
    first = make_cases(base, tmp_path, 1)[1]
    folder = tmp_path / "adapter-0"
    async with running(base, partial(MemoryBus, MemoryServer()), enable_lora=True) as system:
        await ask(system, [first])
        shutil.rmtree(folder)
        make_adapter(folder, base, seed=77, rank=5)
        second = source_of(folder, base), first[1], greedy(merged(base, folder), first[1], TOKENS)
        assert second[2] != first[2]
        await ask(system, [second])


async def test_an_adapter_that_is_gone_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    base = family(tmp_path, "llama2")
    plain, cases = make_cases(base, tmp_path, 1)
    shutil.rmtree(tmp_path / "adapter-0")
    async with running(base, partial(MemoryBus, MemoryServer()), enable_lora=True) as system:
        system.submit([1, 2, 3], cases[0], max_tokens=4)
        await ask(system, [plain])
        await eventually(system.failures)
        failed = await system.failures()
        assert failed[0].status == 500
        assert "there is no such folder" in failed[0].message


async def test_metrics_name_adapters_that_run_and_that_wait(tmp_path: Path) -> None:
    """One series at a time: with one place, one of two adapters waits until the other has ended."""
    base = family(tmp_path, "llama2")
    sources = [source_of(make_adapter(tmp_path / name, base, seed=1, rank=1 + rank), base) for rank, name in
               enumerate(("first", "second"))]  # fmt: skip
    metrics = Metrics()
    shown = SchedulerMetrics(metrics)
    async with running(base, partial(MemoryBus, MemoryServer()), enable_lora=True) as system:

        async def labels() -> dict[str, str]:
            shown.update(system.scheduler.core)
            found = [each for name, each, _ in metrics.snapshot()["series"] if name == "vllm:lora_requests_info"]
            return dict(*found)

        assert await labels() == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        futures = [system.submit([1, 2, 3], source, max_tokens=300)[1] for source in sources]
        both = {"max_lora": "1", "running_lora_adapters": "first", "waiting_lora_adapters": "second"}

        async def are_both_there() -> bool:
            return await labels() in (
                both,
                {**both, "running_lora_adapters": "second", "waiting_lora_adapters": "first"},
            )

        await eventually(are_both_there)
        await asyncio.gather(*futures)
        await system.until_clean()
        assert await labels() == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        resident = [data for name, _, data in metrics.snapshot()["series"] if name == "pagebus:resident_adapters"]
        assert resident == [{"value": 1}]
