"""Adapters of embeddings and heads: greedy tokens and log probabilities are PEFT's own, in float32.

``PAGEBUS_TEST_ADAPTERS=full`` runs each family with 1, 8 and 64 adapters in a step.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.lora.adapters import greedy, merged, source_of
from tests.helpers.lora.peft_models import generated_by_peft, save_with_peft
from tests.helpers.model_factory import load_reference, make_model
from tests.system.harness import running
from tests.system.lora.test_http import call
from tests.system.lora.test_peft import FULL
from tests.system.lora.test_tokens import TOKENS, Cases, ask, family, prompts
from tests.system.serving import serving as server

WARNINGS = "UserWarning", "RuntimeWarning"
pytestmark = [pytest.mark.share(6), *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in WARNINGS)]
"""PEFT tells what it saves, and what is tied."""
TARGETS = ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head")
CASES = [("llama3", 4), ("qwen3-tied", 4), ("gemma2", 2), ("granite", 2)]
if FULL:
    CASES = list(product(("llama3", "qwen3-tied", "gemma2", "granite", "gemma3"), (1, 8, 64)))


def base_of(name: str, tmp_path: Path) -> Path:
    if name == "qwen3-tied":
        return make_model(tmp_path / "base", "qwen3", seed=3, tie_word_embeddings=True)
    return family(tmp_path, name)


def fields(index: int, name: str) -> dict[str, Any]:
    """Of the adapter with this index: head or embedding, both, or tied, alone and with others."""
    tied = {"ensure_weight_tying": True} if name == "qwen3-tied" else {}
    patterns: list[dict[str, Any]] = [
        {"target_modules": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"], "use_rslora": True, **tied},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"lm_head": 9}},
        {"target_modules": ["q_proj", "down_proj"]},
    ]  # fmt: skip
    return {"r": 1 + index % 12, "lora_alpha": 4 + index % 3, **patterns[index % 4]}


def make_cases(base: Path, tmp_path: Path, name: str, count: int) -> Cases:
    asked = prompts(2 if count < 64 else 1, 0)
    cases: Cases = [(None, asked, greedy(merged(base, None), asked, TOKENS))]
    for index in range(count):
        folder = save_with_peft(base, tmp_path / f"adapter-{index}", seed=index, **fields(index, name))
        (told,) = generated_by_peft(base, [folder], [asked], TOKENS)
        cases.append((source_of(folder, base, targets=TARGETS), asked, told))
    answers = [str(told) for _, _, told in cases]
    assert len(set(answers)) == len(answers), "the adapters do not differ"
    return cases


def serving(base: Path, count: int, **options: object) -> Any:
    lora = {"enable_lora": True, "max_loras": count, "lora_target_modules": TARGETS}
    return running(base, partial(MemoryBus, MemoryServer()), **lora, **options)


@pytest.mark.parametrize(("name", "count"), CASES)
async def test_tokens_are_those_of_peft(name: str, count: int, tmp_path: Path) -> None:
    """The second time prompts are cached. Gemma and Granite multiply embeddings, and bound or divide logits."""
    base = base_of(name, tmp_path)
    cases = make_cases(base, tmp_path, name, count)
    async with serving(base, count) as system:
        await ask(system, cases)
        await ask(system, cases)


async def test_few_blocks_and_drafts(tmp_path: Path) -> None:
    """Rows have several tokens to verify, and are preempted."""
    base = base_of("llama3", tmp_path)
    cases = make_cases(base, tmp_path, "llama3", 4)
    tight = {"num_gpu_blocks_override": 24, "max_model_len": 96, "preemption_mode": "swap", "swap_space": 0.01}
    drafts = {"spec_method": "ngram", "spec_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    async with serving(base, 2, max_num_batched_tokens=24, **tight, **drafts) as system:
        await ask(system, cases)


@pytest.mark.parametrize(("name", "ranks"), [("llama3", 2), ("qwen3-tied", 4)])
async def test_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    """Of the head each rank has its part of the vocabulary, and of embeddings all."""
    base = base_of(name, tmp_path)
    cases = make_cases(base, tmp_path, name, 4)
    async with serving(base, 4, tensor_parallel_size=ranks) as system:
        await ask(system, cases)


async def test_log_probabilities_of_prompts(tmp_path: Path) -> None:
    """Prompts with different adapters share steps: each token of them is scored by its own head."""
    base, prompt = base_of("llama3", tmp_path), prompts(1, 3)[0]
    folders = [save_with_peft(base, tmp_path / str(seed), seed=seed, **fields(2, "")) for seed in range(2)]
    options = {
        "enable_lora": True, "max_loras": 2, "lora_target_modules": TARGETS, "skip_tokenizer_init": True,
        "served_model_name": ("base",), "lora_modules": tuple(f"{folder.name}={folder}" for folder in folders),
    }  # fmt: skip
    async with server(base, **options) as served:
        asked = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1}
        names = ["base", *(folder.name for folder in folders)]
        answers = await asyncio.gather(*(call(served, "/v1/completions", model=name, **asked) for name in names))
    for (status, answer), folder in zip(answers, [None, *folders], strict=True):
        assert status == 200, answer
        told = answer["choices"][0]["prompt_logprobs"]
        found = [told[place][str(token)]["logprob"] for place, token in enumerate(prompt) if place]
        torch.testing.assert_close(torch.tensor(found), expected(base, folder, prompt), atol=1e-4, rtol=1e-4)


def expected(base: Path, folder: Path | None, prompt: list[int]) -> torch.Tensor:
    import peft

    model = load_reference(base)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, str(folder))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].log_softmax(1)
    return logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
