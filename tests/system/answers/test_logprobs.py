"""Log probabilities through the whole system, over HTTP: they are those of transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import pagebus.actors.shipped_model
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference
from tests.helpers.waiting import eventually
from tests.system.serving import Client, serving

pytestmark = pytest.mark.share(6)

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
ONE_PER_ARCHITECTURE = list({config.arch: config for config in REFERENCE_CONFIGS}.values())
NUM_TOKENS = 5
TOLERANCE = 1e-4


def reference_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log softmax [len(ids), V] after each token."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(1)


def token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def check_logprobs(told: dict[str, Any], ids: list[int], model: Any, first: int, num_top: int) -> None:
    """``told`` is about ids[first:]; alternatives and all values are the model's."""
    expected = reference_logprobs(model, ids)
    assert [token_id(name) for name in told["tokens"]] == ids[first:]
    for place, token in enumerate(ids[first:]):
        value, tops = told["token_logprobs"][place], told["top_logprobs"][place]
        if first + place == 0:
            assert value is None
            assert tops is None
            continue
        row = expected[first + place - 1]
        best = row.topk(num_top)
        assert value == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert {token_id(name) for name in tops} == {token, *best.indices.tolist()}
        for name, told_value in tops.items():
            assert told_value == pytest.approx(float(row[token_id(name)]), abs=TOLERANCE)


@pytest.mark.parametrize("config", ONE_PER_ARCHITECTURE, ids=lambda config: config.arch)
async def test_equal_transformers(config, tmp_path):
    """Output, echoed prompts and prompts alone, for many requests at once whose prompts come in chunks and are partly
    cached; also for sampled tokens with penalties: what is told is what the model itself thinks."""
    folder = make_reference(tmp_path, config)
    model = load_reference(folder)
    rng = random.Random(3)
    shared = [rng.randrange(config.vocab_size) for _ in range(40)]
    prompts = [shared[: rng.choice((1, 20, 40))] + [rng.randrange(config.vocab_size) for _ in range(length)]
               for length in (0, 1, 5, 17, 30)]  # fmt: skip
    common = {
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    variants = [
        {"logprobs": 3},
        {"logprobs": 20, "echo": True},
        {"logprobs": 1, "echo": True, "max_tokens": 0},
        {"logprobs": 2, "temperature": 1.5, "seed": 3, "repetition_penalty": 1.4, "top_k": 50},
        {"logprobs": 0},
        {},
    ]
    async with serving(folder, max_num_batched_tokens=32) as client:
        calls = [(prompt, variant) for prompt in prompts for variant in variants]
        answers = await asyncio.gather(*(client.completion(prompt, **(common | variant)) for prompt, variant in calls))

    for (prompt, variant), answer in zip(calls, answers, strict=True):
        (choice,) = answer["choices"]
        output = choice["token_ids"]
        assert choice["prompt_token_ids"] == prompt
        assert len(output) == answer["usage"]["completion_tokens"] == variant.get("max_tokens", NUM_TOKENS)
        if "logprobs" not in variant:
            assert choice["logprobs"] is None
            continue
        first = 0 if "echo" in variant else len(prompt)
        check_logprobs(choice["logprobs"], prompt + output, model, first, variant["logprobs"])


async def test_prompt_logprobs(tmp_path):
    """vLLM's shape, ranks included; a prompt that is cached is computed again, and is cached for others."""
    config = ONE_PER_ARCHITECTURE[0]
    folder = make_reference(tmp_path, config)
    model = load_reference(folder)
    prompt = [random.Random(1).randrange(config.vocab_size) for _ in range(50)]
    async with serving(folder, max_num_batched_tokens=32) as client:
        first = await client.completion(prompt, max_tokens=1)
        answer = await client.completion(prompt, max_tokens=1, prompt_logprobs=4, n=2)
        last = await client.completion(prompt, max_tokens=1)

    assert first["choices"][0]["logprobs"] is None
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    told = answer["choices"][0]["prompt_logprobs"]
    assert told == answer["choices"][1]["prompt_logprobs"]
    assert told[0] is None
    expected = reference_logprobs(model, prompt)
    for place, token in enumerate(prompt[1:], 1):
        row = expected[place - 1]
        order = row.argsort(descending=True).tolist()
        assert set(told[place]) == {str(token), *map(str, order[:4])}
        for name, entry in told[place].items():
            assert entry["logprob"] == pytest.approx(float(row[int(name)]), abs=TOLERANCE)
            assert entry["rank"] == order.index(int(name)) + 1
            assert entry["decoded_token"] == ""


async def test_preemption_tells_every_token_once(tmp_path):
    """Prompts that are computed twice, with a pool too small for all, are told once and right."""
    config = ONE_PER_ARCHITECTURE[-1]
    folder = make_reference(tmp_path, config)
    model = load_reference(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(40)] for _ in range(8)]
    options = {"logprobs": 2, "echo": True, "max_tokens": 40, "ignore_eos": True, "return_tokens_as_token_ids": True,
               "return_token_ids": True}  # fmt: skip
    async with serving(folder, max_num_batched_tokens=32, num_gpu_blocks_override=14, max_model_len=128) as client:
        answers = await asyncio.gather(*(client.completion(prompt, **options) for prompt in prompts))

        async def preempted() -> bool:  # metrics are published once a second
            return await client.metric(lambda line: line.startswith("vllm:num_preemptions")) > 0

        await eventually(preempted)
    for prompt, answer in zip(prompts, answers, strict=True):
        (choice,) = answer["choices"]
        check_logprobs(choice["logprobs"], prompt + choice["token_ids"], model, 0, 2)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(SHIPPED)


async def test_lm_eval(reference):
    """What lm-eval's local-completions sends and reads: batched token ids, echo, one token, the best alternative."""
    rng = random.Random(2)
    prompts = [[rng.randrange(100, 2000) for _ in range(length)] for length in (3, 30, 9)]
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    async with serving(SHIPPED) as client:
        answer = await client.completion(prompts, **options)

    for index, (prompt, choice) in enumerate(zip(prompts, answer["choices"], strict=True)):
        assert choice["index"] == index
        expected = reference_logprobs(reference, prompt)
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["tokens"]) == len(told["top_logprobs"]) == len(prompt) + 1
        for place in range(1, len(prompt)):
            row = expected[place - 1]
            assert told["token_logprobs"][place] == pytest.approx(float(row[prompt[place]]), abs=TOLERANCE)
            best = max(told["top_logprobs"][place].values())
            assert best == pytest.approx(float(row.max()), abs=TOLERANCE)
        assert "".join(told["tokens"]) == choice["text"]
        assert [choice["text"][offset:][: len(token)] for offset, token in
                zip(told["text_offset"], told["tokens"], strict=True)] == told["tokens"]  # fmt: skip


def near(values: list[Any]) -> list[Any]:
    """Log probabilities that differ by less than a thousandth equal these: in other batches the rest may differ."""
    return [
        {text: pytest.approx(each, abs=1e-3) for text, each in value.items()} if isinstance(value, dict)
        else pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
        for value in values
    ]  # fmt: skip


async def test_streams_tell_what_whole_answers_tell():
    """The same tokens, values and offsets, with echo, several choices, stop strings; chats too."""
    options = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 3, "logprobs": 2, "stop": ["e ", "zz"]}
    async with serving(SHIPPED) as client:
        for more in ({}, {"echo": True}):
            whole = await client.post("completions", prompt="water is a", **options, **more)
            chunks = await client.stream("completions", prompt="water is a", **options, **more)
            for choice in whole["choices"]:
                parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
                assert "".join(part["text"] for part in parts) == choice["text"]
                for name, values in choice["logprobs"].items():
                    streamed = [value for part in parts for value in part["logprobs"][name]]
                    assert streamed == near(values), name
                assert parts[-1]["finish_reason"] == choice["finish_reason"]
        chat = {"messages": [{"role": "user", "content": "What is a dog?"}], "max_tokens": 9, "temperature": 0,
                "logprobs": True, "top_logprobs": 2, "return_token_ids": True}  # fmt: skip
        whole = await client.post("chat/completions", **chat)
        chunks = await client.stream("chat/completions", **chat)

    (choice,) = whole["choices"]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert told == choice["logprobs"]["content"]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_a_stop_string_cuts_the_text_and_not_the_tokens():
    """As in vLLM: the token that completes the stop string is told, its text is not."""
    async with serving(SHIPPED) as client:
        whole = (await client.completion("a dog is", max_tokens=8, logprobs=0))["choices"][0]
        tokens = whole["logprobs"]["tokens"]
        stop = tokens[3].strip() or tokens[3]
        cut = (await client.completion("a dog is", max_tokens=8, logprobs=0, stop=stop))["choices"][0]

    end = len(cut["logprobs"]["tokens"])
    assert cut["logprobs"]["tokens"] == tokens[:end]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert len("".join(tokens[: end - 1])) < len(cut["text"]) + len(stop) <= len("".join(tokens[:end]))


async def test_best_of():
    """The choices with the largest sum of log probabilities, the best first."""
    options = {"max_tokens": 6, "temperature": 1.0, "seed": 4, "logprobs": 0, "ignore_eos": True}
    async with serving(SHIPPED) as client:
        all_of_them = await client.post("completions", prompt="a dog is", n=6, **options)
        best = await client.post("completions", prompt=["a dog is", "a cat"], n=2, best_of=6, **options)
        plain = await client.post("completions", prompt="a dog is", best_of=6, **(options | {"logprobs": None}))
        error = await client.refused("completions", prompt="a dog is", best_of=2, stream=True)

    ranked = sorted(all_of_them["choices"], key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"][:2]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 72
    assert [choice["text"] for choice in plain["choices"]] == [ranked[0]["text"]]
    assert plain["choices"][0]["logprobs"] is None
    assert error["param"] == "best_of"


async def test_echo_without_output():
    """max_tokens 0 gives the prompt and nothing else, streamed or not; without echo it is refused."""

    async def texts(client: Client, **body: Any) -> tuple[str, str]:
        whole = await client.completion(**body)
        chunks = await client.stream("completions", temperature=0, **body)
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
        return whole["choices"][0]["text"], "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async with serving(SHIPPED) as client:
        assert await texts(client, prompt="A dog,  indeed", echo=True, max_tokens=0) == ("A dog,  indeed",) * 2
        assert (await client.refused("completions", prompt="x", max_tokens=0))["param"] == "max_tokens"
        assert (await client.refused("completions", prompt="x", prompt_logprobs=1, stream=True))["param"]
