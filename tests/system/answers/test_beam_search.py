"""Beam search through the whole system, over HTTP: the beams are those of transformers, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import pagebus.actors.shipped_model
from tests.helpers.beam_reference import reference_beams
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference, num_pages, reference_generate
from tests.helpers.waiting import eventually
from tests.system.serving import Client, serving

pytestmark = pytest.mark.share(6)

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
CONFIGS = {config.arch: config for config in REFERENCE_CONFIGS}
ENDS = list(range(0, 300, 7))
"""So many that random models often reach one."""
SEARCHES: list[dict[str, Any]] = [
    {"n": 2, "max_tokens": 20, "stop_token_ids": ENDS},
    {"n": 3, "max_tokens": 24, "stop_token_ids": ENDS[:9], "length_penalty": 2.0},
    {"n": 6, "max_tokens": 18, "stop_token_ids": ENDS, "length_penalty": 0.5, "min_tokens": 5},
    {"n": 4, "max_tokens": 17},
    {"n": 5, "max_tokens": 20, "stop_token_ids": ENDS, "length_penalty": -1.0, "early_stopping": True},
]
CONDITIONS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "swap": {"num_gpu_blocks_override": 15, "preemption_mode": "swap", "swap_space": 0.01},
    "recompute": {"num_gpu_blocks_override": 15, "preemption_mode": "recompute", "enable_prefix_caching": False},
}


def prompts_for(vocab_size: int) -> list[list[int]]:
    """Of different lengths; most begin alike."""
    rng = random.Random(4)
    shared = [rng.randrange(vocab_size) for _ in range(32)]
    return [shared[: rng.choice((1, 16, 32))] + [rng.randrange(vocab_size) for _ in range(length)]
            for length in (0, 5, 16, 9, 1)]  # fmt: skip


def expected(model: Any, prompt: list[int], options: dict[str, Any]) -> list[list[int]]:
    """The beams' tokens by transformers."""
    given = dict(options)
    width, max_tokens, ends = given.pop("n"), given.pop("max_tokens"), given.pop("stop_token_ids", [])
    return [tokens for tokens, _ in reference_beams(model, prompt, width, max_tokens, ends, **given)]


async def preempted(client: Client) -> bool:
    return await client.metric(lambda line: line.startswith("vllm:num_preemptions")) > 0


@pytest.mark.parametrize("arch", ["llama3", "mistral", "qwen3"])
async def test_equals_transformers(arch: str, tmp_path: Path) -> None:
    """Several searches and ordinary requests at once: with room for all (twice, then with the prompts cached), and in a
    pool so small that they preempt each other, by swap and by recompute."""
    folder = make_reference(tmp_path, CONFIGS[arch])
    model = load_reference(folder)
    prompts = prompts_for(CONFIGS[arch].vocab_size)
    calls = list(zip(prompts, SEARCHES, strict=True))
    wanted = [expected(model, prompt, options) for prompt, options in calls]
    plain = reference_generate(folder, prompts, 20)
    common = {"ignore_eos": True, "return_token_ids": True}
    for condition, settings in CONDITIONS.items():
        if "num_gpu_blocks_override" in settings:
            settings = settings | {"num_gpu_blocks_override": 15 * num_pages(folder)}
        async with serving(folder, max_num_batched_tokens=32, max_model_len=80, max_num_seqs=16, **settings) as client:
            for _ in range(2 if condition == "plenty" else 1):
                searches = [
                    client.completion(prompt, use_beam_search=True, **options, **common) for prompt, options in calls
                ]
                others = [client.completion(prompt, max_tokens=20, **common) for prompt in prompts]
                answers = await asyncio.gather(*others, *searches)
                got = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]
                assert got[: len(others)] == [[tokens] for tokens in plain], condition
                assert got[len(others) :] == wanted, condition
            if condition != "plenty":
                await eventually(lambda client=client: preempted(client))


async def test_the_models_own_end(tmp_path: Path) -> None:
    """End tokens of the model's configuration end beams, unless they are ignored; the finish reason says so."""
    folder = make_reference(tmp_path, CONFIGS["qwen2"])
    model = load_reference(folder)
    model.config.eos_token_id = model.generation_config.eos_token_id = ENDS
    model.save_pretrained(str(folder))
    prompt = prompts_for(model.config.vocab_size)[2]
    options = {"n": 3, "max_tokens": 12}
    async with serving(folder) as client:
        answer = await client.completion(prompt, use_beam_search=True, return_token_ids=True, **options)
        endless = await client.completion(
            prompt, use_beam_search=True, return_token_ids=True, ignore_eos=True, **options
        )

    wanted = expected(model, prompt, options | {"stop_token_ids": ENDS})
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "stop" if tokens[-1] in ENDS else "length" for tokens in wanted
    ]
    assert answer["usage"]["completion_tokens"] == sum(map(len, wanted))
    assert [choice["token_ids"] for choice in endless["choices"]] == expected(model, prompt, options)


async def test_what_is_told() -> None:
    """Texts, log probabilities of the beams' own paths, order and count of choices; completions and chats."""
    reference = load_reference(SHIPPED)
    options = {"max_tokens": 8, "use_beam_search": True, "return_token_ids": True}
    async with serving(SHIPPED) as client:
        scored = await client.completion("a dog is", n=3, logprobs=2, return_tokens_as_token_ids=True, **options)
        best = await client.completion("a dog is", n=2, best_of=3, echo=True, **options)
        messages = [{"role": "user", "content": "What is a dog?"}]
        chat = await client.post("chat/completions", messages=messages, n=2, logprobs=True, top_logprobs=1, **options)
        ended = await client.post("chat/completions", messages=messages, n=2, **(options | {"max_tokens": 60}))

    means = []
    for choice in scored["choices"]:
        told, ids = choice["logprobs"], choice["prompt_token_ids"] + choice["token_ids"]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].float().log_softmax(1)
        first = len(choice["prompt_token_ids"])
        for place, token in enumerate(choice["token_ids"]):
            row = logprobs[first + place - 1]
            assert told["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
            assert {f"token_id:{i}" for i in row.topk(2).indices.tolist()} <= told["top_logprobs"][place].keys()
        means.append(sum(told["token_logprobs"]) / len(choice["token_ids"]))
    assert means == sorted(means, reverse=True)
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in best["choices"]] == [each["token_ids"] for each in scored["choices"][:2]]
    assert [choice["text"] for choice in best["choices"]] == [
        "a dog is" + each["text"] for each in scored["choices"][:2]
    ]
    assert best["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in best["choices"])
    assert all(len(choice["logprobs"]["content"]) == len(choice["token_ids"]) for choice in chat["choices"])
    assert {choice["finish_reason"] for choice in ended["choices"]} == {"stop"}
    assert all("<|" not in choice["message"]["content"] for choice in ended["choices"])


async def test_include_stop_str_in_output() -> None:
    """The end token is text if it is asked for, and shown."""
    messages = [{"role": "user", "content": "What is a dog?"}]
    options = {"messages": messages, "max_tokens": 60, "use_beam_search": True, "skip_special_tokens": False}
    async with serving(SHIPPED) as client:
        (without,) = (await client.post("chat/completions", **options))["choices"]
        (shown,) = (await client.post("chat/completions", include_stop_str_in_output=True, **options))["choices"]
    assert shown["message"]["content"].startswith(without["message"]["content"])
    assert shown["message"]["content"].endswith("<|end|>")
    assert "<|end|>" not in without["message"]["content"]


async def test_refusals() -> None:
    """What a search cannot do is a 400 that names the field; so is a width beyond the server's."""
    async with serving(SHIPPED, max_beam_width=4) as client:
        for body, param in (({"n": 5}, "n"), ({"n": 2, "best_of": 5}, "best_of"), ({"stream": True}, "stream"),
                            ({"stop": "x"}, "stop"), ({"n": 2, "logprobs": 1, "echo": True}, "echo")):  # fmt: skip
            error = await client.refused("completions", prompt="x", use_beam_search=True, **body)
            assert error["param"] == param
