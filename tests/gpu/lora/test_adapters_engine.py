"""Adapters of an engine on the GPU: every token is that of the adapter's own model, with graphs and without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.lora.adapters import greedy, make_adapter, merged, source_of
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.packers import PACKERS
from tests.system.harness import running
from tests.system.lora.test_tokens import TOKENS, ask, make_cases, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("more", [{}, {"spec_method": "ngram", "spec_tokens": 3, "prompt_lookup_min": 1}])
async def test_tokens_are_those_of_the_merged_model(
    tmp_path: Path, more: dict[str, object], *, enforce_eager: bool
) -> None:
    """Three adapters of different ranks and the model alone share steps, in float32, with drafts and without."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = make_model(tmp_path / "base", "llama3", seed=3, std=0.08, head_dim=64, **sizes)
    cases = make_cases(base, tmp_path, 3)
    answers = [str(told) for _, _, told in cases]
    assert len(set(answers)) == len(answers), "the adapters do not differ"
    options = {
        "enable_lora": True, "max_loras": 3, "max_num_batched_tokens": 96, "device": "cuda", "dtype": "float32",
        "enforce_eager": enforce_eager, "num_gpu_blocks_override": 256, **more,
    }  # fmt: skip
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)  # now from the prefix cache


@pytest.mark.parametrize("packer", ["ct-int8", "gptq-4-zeros"])
async def test_quantized_weights(tmp_path: Path, packer: str) -> None:
    """The oracle is the model that the quantized weights mean, with the adapter merged into that, in float32."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = make_model(tmp_path / "base", "llama3", seed=3, std=0.08, head_dim=64, **sizes)
    quantized, dense = quantize(base, tmp_path, PACKERS[packer])
    cases = make_cases(dense, tmp_path, 3)
    options = {
        "enable_lora": True, "max_loras": 3, "device": "cuda", "dtype": "float32", "num_gpu_blocks_override": 256,
    }  # fmt: skip
    async with running(quantized, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)


@pytest.mark.parametrize("enforce_eager", [True, False])
async def test_embeddings_and_heads(tmp_path: Path, *, enforce_eager: bool) -> None:
    """Both, one of them and none share steps, with drafts that are verified, in float32."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = make_model(tmp_path / "base", "llama3", seed=3, std=0.08, head_dim=64, **sizes)
    asked, cases = prompts(3, 0), make_cases(base, tmp_path, 1)
    for seed, targets in enumerate((("lm_head",), ("embed_tokens", "q_proj"), ("embed_tokens", "lm_head"))):
        folder = make_adapter(tmp_path / f"words-{seed}", base, seed=seed, rank=3 + 5 * seed, targets=targets)
        cases.append((source_of(folder, base, targets=targets), asked, greedy(merged(base, folder), asked, TOKENS)))
    assert len({str(told) for *_, told in cases}) == len(cases), "the adapters do not differ"
    options = {
        "enable_lora": True, "max_loras": 4, "lora_target_modules": ("q_proj", "v_proj", "embed_tokens", "lm_head"),
        "max_num_batched_tokens": 96, "device": "cuda", "dtype": "float32", "enforce_eager": enforce_eager,
        "num_gpu_blocks_override": 256, "spec_method": "ngram", "spec_tokens": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)
