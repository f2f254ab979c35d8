"""Adapters divided among ranks: greedy tokens are PEFT's own, in float32, and the trouble of one rank is no drift."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagebus.actors.executor.adapters import residents
from pagebus.actors.executor.adapters.reading import AdapterNumbers, Read, reader
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.projections import projections
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AdapterSource
from tests.helpers.lora.adapters import source_of
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.packers import PACKERS
from tests.helpers.waiting import LIMIT_S, eventually
from tests.system.harness import running
from tests.system.lora import test_tokens
from tests.system.lora.test_peft import make_cases
from tests.system.lora.test_tokens import TOKENS, ask, family, prompts

pytestmark = pytest.mark.share(6)

ADAPTERS = 4
DIVIDED = [
    ("llama3", 4), ("qwen3", 2), ("qwen2-odd", 2), ("phi3-partial", 4), ("qwen3-moe", 2), ("olmo2", 2), ("cohere", 2),
    ("deepseek-v2-lite", 2),
]  # fmt: skip
"""Families and numbers of ranks. Two ranks of llama3 have the same head of keys; so have all of the odd one and of
phi3-partial, whose queries are divided unevenly. phi3 has fused tensors, olmo2 norms over all heads, cohere one norm
for both parts, and latents of DeepSeek are whole on each rank."""
RANKS: dict[str, Any] = {"enable_lora": True, "tensor_parallel_size": 2}


def make_bus() -> partial[MemoryBus]:
    return partial(MemoryBus, MemoryServer())


@pytest.mark.parametrize(("name", "ranks"), DIVIDED)
async def test_tokens_are_those_of_peft(name: str, ranks: int, tmp_path: Path) -> None:
    """Ranks and scales are mixed, and all adapters are in a step. The second time prompts are cached."""
    base = family(tmp_path, name)
    cases = make_cases(base, tmp_path, name, ADAPTERS)
    options = {"enable_lora": True, "max_loras": ADAPTERS, "tensor_parallel_size": ranks}
    async with running(base, make_bus(), **options) as system:
        await ask(system, cases)
        await ask(system, cases)


async def test_heads_of_keys_are_divided_unevenly(tmp_path: Path) -> None:
    """Three on two ranks: one and two."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    base = make_model(tmp_path / "base", "llama3", seed=3, **sizes)
    async with running(base, make_bus(), max_loras=3, **RANKS) as system:
        await ask(system, test_tokens.make_cases(base, tmp_path, 3))


async def test_fused_by_head(tmp_path: Path) -> None:
    """Files with each head of keys between its queries and its values: tokens are those of one rank."""
    base = family(tmp_path, "internlm2")
    sources = [save_by_our_names(tmp_path / f"{seed}", base, seed) for seed in range(3)]
    told = []
    for ranks in (1, 2):
        options = {"enable_lora": True, "max_loras": 3, "tensor_parallel_size": ranks}
        async with running(base, make_bus(), **options) as system:
            futures = [system.submit(prompts(1, 0)[0], source, max_tokens=TOKENS)[1] for source in sources]
            told.append(await asyncio.gather(*futures))
    assert told[0] == told[1]
    assert len({str(answer) for answer in told[0]}) == len(sources), "the adapters do not differ"


def save_by_our_names(folder: Path, base: Path, seed: int) -> AdapterSource:
    """A random adapter of all projections, whatever other libraries call them."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for projection in projections(ModelConfig.load(base)):
        for module, width in zip(projection.modules, projection.widths, strict=True):
            shapes = {"A": (4, projection.inputs), "B": (width, 4)}
            for matrix, shape in shapes.items():
                name = f"base_model.model.{module}.lora_{matrix}.weight"
                tensors[name] = torch.empty(shape).normal_(0, 0.3, generator=generator)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return source_of(folder, base)


async def test_quantized_weights(tmp_path: Path) -> None:
    quantized, dense = quantize(family(tmp_path, "llama2"), tmp_path, PACKERS["fp8"])
    async with running(quantized, make_bus(), max_loras=3, **RANKS) as system:
        await ask(system, test_tokens.make_cases(dense, tmp_path, 3))


async def test_fewer_places_than_adapters(tmp_path: Path) -> None:
    """They come and go on all ranks alike, while sequences are preempted and swapped."""
    base = family(tmp_path, "qwen2")
    cases = test_tokens.make_cases(base, tmp_path, 5, asked=3)
    options = {
        "max_loras": 2, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 29, "max_model_len": 96,
        "preemption_mode": "swap", "swap_space": 0.01,
    }  # fmt: skip
    async with running(base, make_bus(), **RANKS, **options) as system:
        await ask(system, cases)
        await ask(system, cases)
        assert system.scheduler.core.num_preemptions


async def test_a_rank_is_killed(tmp_path: Path) -> None:
    """Its group ends and starts anew, reads the adapters again, and goes on with the same tokens; so it does when a new
    scheduler leads."""
    base = family(tmp_path, "llama2")
    cases = test_tokens.make_cases(base, tmp_path, 3)
    options = {"max_loras": 2, "max_num_batched_tokens": 24, "lease_ttl_s": 1.0}
    async with running(base, make_bus(), **RANKS, **options) as system:
        asking = asyncio.create_task(ask(system, cases))
        await system.until_tokens(10)
        await system.kill("executor-0.1")
        await system.restart_group("executor-0")
        await system.until_tokens(40)
        await system.replace_scheduler()
        await asking


class RankOne:
    """Has rank 1 read with ``read``, which is told what its own reader would be."""

    def __init__(self, patch: pytest.MonkeyPatch, read: Any) -> None:
        self._read = read
        patch.setattr(residents, "reader", self.reader)

    def reader(self, config: Any, *options: Any) -> Read:
        """As the function of this name."""
        own = reader(config, *options)
        return own if config.shard.rank == 0 else partial(self._read, own)


async def test_one_rank_cannot_read_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with the adapter get one clear error, and nobody else is disturbed. Its place is free again on the rank
    that has read it; when both can, it is served."""
    base = family(tmp_path, "llama2")
    plain, first, second = test_tokens.make_cases(base, tmp_path, 2)
    broken = True

    def read(own: Read, source: AdapterSource) -> AdapterNumbers:
        if broken and source == first[0]:
            raise AdapterError("no adapter found here")
        return own(source)

    RankOne(monkeypatch, read)
    async with running(base, make_bus(), max_loras=1, **RANKS) as system:
        for count in (1, 2):
            system.submit([1, 2, 3], first[0], max_tokens=4)
            await ask(system, [plain, second])

            async def have_failed(wanted: int = count) -> bool:
                return len(await system.failures()) == wanted

            await eventually(have_failed)
        why = "The adapter adapter-0 cannot be loaded: rank 1: no adapter found here"
        assert {(each.status, each.message) for each in await system.failures()} == {(500, why)}
        broken = False
        await ask(system, [plain, first, second])


async def test_one_rank_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until both have read an adapter, no step has it, and steps without it go on."""
    base = family(tmp_path, "llama2")
    plain, adapted = test_tokens.make_cases(base, tmp_path, 1)
    go_on = threading.Event()

    def read(own: Read, source: AdapterSource) -> AdapterNumbers:
        assert go_on.wait(LIMIT_S)
        return own(source)

    RankOne(monkeypatch, read)
    async with running(base, make_bus(), **RANKS) as system:
        waiting = asyncio.create_task(ask(system, [adapted]))
        await ask(system, [plain])
        assert not waiting.done()
        go_on.set()
        await waiting
