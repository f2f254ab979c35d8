"""Embeddings through the whole system, over HTTP: they are the pooled final hidden states of transformers."""

from __future__ import annotations

import asyncio
import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pagebus.actors.shipped_model
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference
from tests.helpers.waiting import eventually
from tests.system.serving import serving

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
ONE_PER_ARCHITECTURE = list({config.arch: config for config in REFERENCE_CONFIGS}.values())
TOLERANCE = 1e-4


def reference(model: Any, ids: list[int], pooling: str, dimensions: int | None = None) -> np.ndarray:
    """The pooled state after the last norm, of length 1."""
    with torch.inference_mode():
        hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    state = (hidden[-1] if pooling == "last" else hidden.mean(0))[:dimensions]
    return state / np.linalg.norm(state)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [*((config, "last") for config in ONE_PER_ARCHITECTURE), (ONE_PER_ARCHITECTURE[-1], "mean")],
    ids=lambda value: getattr(value, "arch", value),
)
async def test_equal_transformers(config, pooling, tmp_path):
    """Prompts in chunks, alone and many at once, beside text that is generated; what is cached, wholly or in part,
    changes nothing."""
    folder = make_reference(tmp_path, config)
    model = load_reference(folder)
    rng = random.Random(3)
    shared = [rng.randrange(config.vocab_size) for _ in range(40)]
    prompts = [shared[: rng.choice((1, 20, 40))] + [rng.randrange(config.vocab_size) for _ in range(length)]
               for length in (0, 1, 5, 17, 70)]  # fmt: skip
    async with serving(folder, max_num_batched_tokens=32, pooling_type=pooling) as client:
        first, *others = await asyncio.gather(
            client.post("embeddings", input=prompts),
            *(client.post("embeddings", input=prompt) for prompt in prompts),
            client.completion(prompts[2], max_tokens=9, ignore_eos=True),
        )
        again = await client.post("embeddings", input=prompts, dimensions=5)

    assert [each["index"] for each in first["data"]] == list(range(len(prompts)))
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0 if pooling == "mean" else cached >= 64
    for index, prompt in enumerate(prompts):
        expected, cut = reference(model, prompt, pooling), reference(model, prompt, pooling, 5)
        (alone,) = others[index]["data"]
        for told in (first["data"][index], alone):
            np.testing.assert_allclose(told["embedding"], expected, atol=TOLERANCE)
        np.testing.assert_allclose(again["data"][index]["embedding"], cut, atol=TOLERANCE)


async def test_preemption(tmp_path):
    """The mean over a prompt that is computed in two runs is the mean."""
    config = ONE_PER_ARCHITECTURE[0]
    folder = make_reference(tmp_path, config)
    model = load_reference(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(100)] for _ in range(6)]
    options = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 12, "max_model_len": 128}
    async with serving(folder, pooling_type="mean", **options) as client:
        texts = (client.completion(prompt[:40], max_tokens=60, ignore_eos=True) for prompt in prompts)
        embeddings = (client.post("embeddings", input=prompt) for prompt in prompts)
        answers = (await asyncio.gather(*texts, *embeddings))[len(prompts) :]

        async def preempted() -> bool:  # metrics are published once a second
            return await client.metric(lambda line: line.startswith("vllm:num_preemptions")) > 0

        await eventually(preempted)
    for prompt, answer in zip(prompts, answers, strict=True):
        np.testing.assert_allclose(answer["data"][0]["embedding"], reference(model, prompt, "mean"), atol=TOLERANCE)


async def test_texts_and_forms():
    """Text is tokenized as prompts are, truncated at either side; base64 says the same; errors name the field."""
    model = load_reference(SHIPPED)
    text = "a dog is an animal"
    async with serving(SHIPPED) as client:
        ids = (await client.completion(text, max_tokens=1, return_token_ids=True))["choices"][0]["prompt_token_ids"]
        one = await client.post("embeddings", input=text, user="me")
        two = await client.post("embeddings", input=[text, "water"], encoding_format="base64")
        head = await client.post("embeddings", input=[ids], truncate_prompt_tokens=2)
        tail = await client.post("embeddings", input=[ids], truncate_prompt_tokens=2, truncation_side="left")
        too_long = await client.refused("embeddings", input=[5] * 1024)
        empty = await client.refused("embeddings", input="")

    expected = reference(model, ids, "last")
    np.testing.assert_allclose(one["data"][0]["embedding"], expected, atol=TOLERANCE)
    decoded = np.frombuffer(base64.b64decode(two["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, expected, atol=TOLERANCE)
    np.testing.assert_allclose(head["data"][0]["embedding"], reference(model, ids[:2], "last"), atol=TOLERANCE)
    np.testing.assert_allclose(tail["data"][0]["embedding"], reference(model, ids[-2:], "last"), atol=TOLERANCE)
    assert (one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) == (len(ids), 0)
    assert one["usage"]["total_tokens"] == len(ids)
    assert tail["usage"]["prompt_tokens"] == 2
    assert (too_long["param"], empty["param"]) == ("input", "input")
