"""Adapters of experts on the GPU: the kernels at the sizes of models, and tokens through the whole system."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.adapted.experts import (
    ExpertTables,
    adapted_experts,
    adapted_experts_invariant,
    adapted_experts_reference,
)
from pagebus.kernels.moe.launch.shapes import Shape
from pagebus.kernels.moe.weights import ExpertWeights
from tests.gpu.errors import worst_row
from tests.gpu.lora.lora_cases import random, random_adapter
from tests.helpers.lora.adapters import source_of
from tests.helpers.lora.experts import save_expert_adapter, told_with
from tests.helpers.model_factory import make_golden
from tests.kernels.lora.tables import contiguous_table
from tests.kernels.moe.launches import GPT_OSS, QWEN3
from tests.system.harness import running
from tests.system.lora import test_tokens
from tests.system.lora.test_tokens import TOKENS, ask, prompts

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]  # fmt: skip
RANKS = (8, None, 16)
"""Of three places; None: an adapter that changes no expert."""
SHAPES = {
    "qwen3": (QWEN3, Gate()), "gpt-oss": (GPT_OSS._replace(experts=8), Gate(GateKind.SWIGLU_CLAMPED)),
}  # fmt: skip


def made(shape: Shape, gate: Gate) -> tuple[ExpertWeights, ExpertTables]:
    experts, _, hidden, width = shape
    biases = (random(experts, 2 * width), random(experts, hidden)) if gate.kind is GateKind.SWIGLU_CLAMPED else ()
    layer = ExpertWeights(
        random(experts, 2 * width, hidden, scale=hidden**-0.5), random(experts, hidden, width, scale=width**-0.5),
        *(biases or (None, None)), gate,
    )  # fmt: skip
    tables = []
    for inputs, widths in ((hidden, (width, width)), (width, (hidden,))):
        ranks = [rank for rank in RANKS for _ in range(experts)]
        every = [None if rank is None else random_adapter(inputs, widths, rank) for rank in ranks]
        tables.append(contiguous_table(every, widths, 16))
    return layer, ExpertTables(*tables)


@pytest.mark.parametrize("name", SHAPES)
def test_sums(name: str) -> None:
    """Few tokens, as many as experts have on average 64 pairs, and more, in a graph too: as the reference."""
    (shape, gate) = SHAPES[name]
    layer, tables = made(shape, gate)
    for count in (1, 33, 300, 64 * shape.experts // shape.top_k):
        x, weights = random(count, shape.hidden), torch.rand(count, shape.top_k, device="cuda")
        chosen = torch.rand(count, shape.experts, device="cuda").argsort(1)[:, : shape.top_k].int().contiguous()
        chosen[count // 2, 0] = -1
        of_token = (torch.arange(count, device="cuda").int() // 5) % (len(RANKS) + 1) - 1
        given = x, weights, chosen, layer, tables, of_token
        wanted = adapted_experts_reference(*given)
        for call in (adapted_experts, adapted_experts_invariant):
            assert worst_row(call(*given), wanted) < 2e-2, (count, call.__name__)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = adapted_experts(*given)
        of_token.copy_(of_token.roll(3))
        graph.replay()
        assert worst_row(captured, adapted_experts_reference(*given)) < 2e-2, count


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
async def test_tokens_are_those_of_the_merged_model(name: str, tmp_path: Path, *, enforce_eager: bool) -> None:
    """Adapters of experts, of attention and none share steps, in float32, from graphs and without."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    }  # fmt: skip
    base = make_golden(tmp_path / "base", name, sizes, seed=3, std=0.08)
    asked, cases = prompts(2, 0), test_tokens.make_cases(base, tmp_path, 1)
    for seed, rank in enumerate((3, 8)):
        folder = save_expert_adapter(base, tmp_path / f"experts-{seed}", seed=seed, rank=rank)
        cases.append((source_of(folder, base, targets=("experts",)), asked, told_with(base, folder, asked, TOKENS)))
    assert len({str(told) for *_, told in cases}) == len(cases), "the adapters do not differ"
    options = {
        "max_num_batched_tokens": 96, "device": "cuda", "dtype": "float32", "enforce_eager": enforce_eager,
        "num_gpu_blocks_override": 256, "max_model_len": 512, "enable_lora": True, "max_loras": 3,
        "lora_target_modules": ("experts", "q_proj", "o_proj"),
    }  # fmt: skip
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)
