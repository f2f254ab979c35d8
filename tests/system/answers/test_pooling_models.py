"""Encoders, embedding models and rerankers through the whole system, over HTTP, beside transformers in float32."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
import torch

from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.actors.model.pooling.tiny_models import make_decoder, make_encoder, write_modules
from tests.helpers.waiting import eventually
from tests.system.serving import serving

TOLERANCE = 1e-5
TEXTS = ["The quick brown fox", "a", "jumps over the lazy dog and the fox", "spaces", "the " * 12]
QUERY = "the quick fox"
ENCODERS = ("bert", "xlm-roberta")


class Reference:
    """A model's folder as transformers loads it."""

    def __init__(self, folder: Path, auto: str = "AutoModel") -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        self.model = getattr(transformers, auto).from_pretrained(str(folder), dtype=torch.float32).eval()

    def encode(self, *texts: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(*texts, return_tensors="pt", **kwargs))

    def states(self, text: str, **kwargs: Any) -> np.ndarray:
        """Hidden states [T, H] after the last norm."""
        with torch.inference_mode():
            return self.model(**self.encode(text, **kwargs)).last_hidden_state[0].double().numpy()

    def logits(self, *texts: str, **kwargs: Any) -> np.ndarray:
        with torch.inference_mode():
            return self.model(**self.encode(*texts, **kwargs)).logits[0].double().numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [each["embedding"] for each in answer["data"]]


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
async def test_encoders_embed_as_transformers(kind: str, pooling: str, tmp_path: Path) -> None:
    """Texts alone and many at once, in steps that hold few of them: each is computed whole, whatever is beside it."""
    folder = make_encoder(tmp_path, kind)
    write_modules(folder, pooling)
    reference = Reference(folder)
    async with serving(folder, max_num_batched_tokens=64) as client:
        together, *alone = await asyncio.gather(
            client.post("embeddings", input=TEXTS), *(client.post("embeddings", input=text) for text in TEXTS)
        )
        raw = await client.post("embeddings", input=TEXTS[0], use_activation=False)

    for index, text in enumerate(TEXTS):
        states = reference.states(text)
        expected = unit(states[0] if pooling == "cls" else states.mean(0))
        np.testing.assert_allclose(vectors(together)[index], expected, atol=TOLERANCE)
        np.testing.assert_allclose(vectors(alone[index])[0], expected, atol=TOLERANCE)
    states = reference.states(TEXTS[0])
    np.testing.assert_allclose(vectors(raw)[0], states[0] if pooling == "cls" else states.mean(0), atol=TOLERANCE)
    assert together["usage"]["prompt_tokens"] == sum(len(reference.encode(text)["input_ids"][0]) for text in TEXTS)


async def test_dense_modules(tmp_path: Path) -> None:
    """A product and its tanh behind the mean, without a norm."""
    from safetensors.torch import load_file

    folder = make_encoder(tmp_path, "bert")
    write_modules(folder, "mean", normalize=False, dense=24)
    reference, tensors = Reference(folder), load_file(str(folder / "2_Dense/model.safetensors"))
    async with serving(folder) as client:
        answer = await client.post("embeddings", input=TEXTS)

    for told, text in zip(vectors(answer), TEXTS, strict=True):
        mean = torch.from_numpy(reference.states(text).mean(0)).float()
        expected = torch.tanh(tensors["linear.weight"] @ mean + tensors["linear.bias"])
        np.testing.assert_allclose(told, expected.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ENCODERS)
async def test_rerankers_score_as_transformers(kind: str, tmp_path: Path) -> None:
    """Pairs with separators and segments, by every route that takes them."""
    folder = make_encoder(tmp_path, kind, classifies=True, num_labels=1, max_position_embeddings=130)
    reference = Reference(folder, "AutoModelForSequenceClassification")
    expected = [float(reference.logits(QUERY, text)[0]) for text in TEXTS]
    async with serving(folder, max_num_batched_tokens=128) as client:
        scores = await client.post("score", text_1=QUERY, text_2=TEXTS)
        raw = await client.post("score", queries=[QUERY], documents=TEXTS, use_activation=False)
        pairs = await client.post("score", data_1=TEXTS, data_2=list(reversed(TEXTS)))
        ranked = await client.post("rerank", query=QUERY, documents=[{"text": text} for text in TEXTS])
        best = [await client.send(path, query=QUERY, documents=TEXTS, top_n=2, return_documents=False)
                for path in ("rerank", "v2/rerank")]  # fmt: skip
        _, classes = await client.send("classify", input=TEXTS)

    assert [each["index"] for each in scores["data"]] == list(range(len(TEXTS)))
    np.testing.assert_allclose([each["score"] for each in scores["data"]], [*map(sigmoid, expected)], atol=TOLERANCE)
    np.testing.assert_allclose([each["score"] for each in raw["data"]], expected, atol=TOLERANCE)
    crossed = [sigmoid(reference.logits(*texts)[0]) for texts in zip(TEXTS, reversed(TEXTS), strict=True)]
    np.testing.assert_allclose([each["score"] for each in pairs["data"]], crossed, atol=TOLERANCE)
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    assert [(each["index"], each["document"]["text"]) for each in ranked["results"]] == [(i, TEXTS[i]) for i in order]
    for _, told in best:
        assert [each["index"] for each in told["results"]] == order[:2]
        assert "document" not in told["results"][0]
    alone = [sigmoid(reference.logits(text)[0]) for text in TEXTS]
    np.testing.assert_allclose([each["probs"][0] for each in classes["data"]], alone, atol=TOLERANCE)


async def test_classifiers(tmp_path: Path) -> None:
    """Probabilities of several labels; what such a model does not do is a 400 that says so."""
    labels = {"id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
    folder = make_encoder(tmp_path, "bert", classifies=True, **labels)
    reference = Reference(folder, "AutoModelForSequenceClassification")
    async with serving(folder) as client:
        _, told = await client.send("classify", input=TEXTS)
        _, invoked = await client.send("invocations", input=TEXTS)
        _, raw = await client.send("pooling", input=TEXTS[0], use_activation=False)
        errors = [
            await client.refused("score", text_1="a", text_2="b"),
            await client.refused("embeddings", input="a"),
            await client.refused("completions", prompt="a"),
            await client.refused("chat/completions", messages=[{"role": "user", "content": "a"}]),
        ]

    for each, text in zip(told["data"], TEXTS, strict=True):
        powers = np.exp(reference.logits(text))
        np.testing.assert_allclose(each["probs"], powers / powers.sum(), atol=TOLERANCE)
        assert (each["label"], each["num_classes"]) == (("bad", "fair", "good")[int(powers.argmax())], 3)
    assert [each["label"] for each in invoked["data"]] == [each["label"] for each in told["data"]]
    np.testing.assert_allclose(raw["data"][0]["data"], reference.logits(TEXTS[0]), atol=TOLERANCE)
    assert [error["reason"] for error in errors] == ["unsupported_task"] * 4
    assert "num_labels == 1" in errors[0]["message"]
    assert errors[1]["message"] == "The model does not support Embeddings API"


@pytest.mark.parametrize("kind", ENCODERS)
async def test_lengths(kind: str, tmp_path: Path) -> None:
    """All positions of the model can be had, and no more: longer texts are refused, or cut with their end tokens."""
    folder = make_encoder(tmp_path, kind, classifies=True, num_labels=1)
    reference = Reference(folder, "AutoModelForSequenceClassification")
    long, positions = "fox " * 100, 66 if kind == "bert" else 64
    cut = [sigmoid(reference.logits(QUERY, long, truncation=True, max_length=length)[0]) for length in (positions, 12)]
    both = sigmoid(reference.logits(long, long, truncation=True, max_length=31)[0])
    async with serving(folder, max_num_batched_tokens=512) as client:
        (model,) = (await client.json("/v1/models"))["data"]
        error = await client.refused("score", text_1=QUERY, text_2=long)
        whole = await client.post("score", text_1=QUERY, text_2=long, truncate_prompt_tokens=-1)
        short = await client.post("rerank", query=QUERY, documents=[long], truncate_prompt_tokens=12)
        halves = await client.post("score", text_1=long, text_2=long, truncate_prompt_tokens=31)
        full = await client.send("classify", input=[[7] * positions])
        over = await client.send("classify", input=[[7] * (positions + 1)])

    assert model["max_model_len"] == positions
    assert f"maximum context length is {positions} tokens" in error["message"]
    assert "output" not in error["message"]
    assert whole["data"][0]["score"] == pytest.approx(cut[0], abs=TOLERANCE)
    assert short["results"][0]["relevance_score"] == pytest.approx(cut[1], abs=TOLERANCE)
    assert halves["data"][0]["score"] == pytest.approx(both, abs=TOLERANCE)
    assert (whole["usage"]["prompt_tokens"], short["usage"]["prompt_tokens"]) == (positions, 12)
    assert (full[0], over[0]) == (200, 400)


async def test_qwen3_embedding(tmp_path: Path) -> None:
    """The last token's state, which is that of the end token, once however the text ends; files of a bare model."""
    folder = make_decoder(tmp_path, kind="Model", tie_word_embeddings=True)
    write_modules(folder, "last")
    reference = Reference(folder)
    texts = [*TEXTS, "ends itself</s>"]
    async with serving(folder, max_num_batched_tokens=16) as client:
        answer = await client.post("embeddings", input=texts)
        cut = await client.post("embeddings", input=TEXTS[2], truncate_prompt_tokens=5)
        alike = await client.post("score", text_1=TEXTS[0], text_2=TEXTS[2:4])
        error = await client.refused("completions", prompt="a")

    expected = [unit(reference.states(text.removesuffix("</s>"))[-1]) for text in texts]
    for told, vector in zip(vectors(answer), expected, strict=True):
        np.testing.assert_allclose(told, vector, atol=TOLERANCE)
    kept = unit(reference.states(TEXTS[2], truncation=True, max_length=5)[-1])
    np.testing.assert_allclose(vectors(cut)[0], kept, atol=TOLERANCE)
    cosines = [expected[0] @ expected[2], expected[0] @ expected[3]]
    np.testing.assert_allclose([each["score"] for each in alike["data"]], cosines, atol=TOLERANCE)
    assert error["message"] == "The model does not support Completions API"


async def test_scores_of_a_causal_classifier(tmp_path: Path) -> None:
    """A `score` head on the last token; a pair is one text behind the other."""
    folder = make_decoder(tmp_path, kind="ForSequenceClassification", num_labels=1, pad_token_id=3)
    reference = Reference(folder, "AutoModelForSequenceClassification")
    async with serving(folder, max_num_batched_tokens=16) as client:
        answer = await client.post("score", text_1=QUERY, text_2=TEXTS)
    expected = [sigmoid(reference.logits(QUERY + text)[0]) for text in TEXTS]
    np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=TOLERANCE)


TEMPLATE = "{% for each in messages %}<{{ each['role'] }}>: {{ each['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("tied", [True, False])
async def test_qwen3_reranker(tied: bool, tmp_path: Path) -> None:
    """p(yes) against p(no) as the next token, of pairs that the given template renders."""
    folder = make_decoder(tmp_path, tie_word_embeddings=tied)
    reference = Reference(folder, "AutoModelForCausalLM")
    no, yes = reference.tokenizer.convert_tokens_to_ids(["n", "y"])

    def relevance(prompt: str) -> float:
        with torch.inference_mode():
            logits = reference.model(**reference.encode(prompt)).logits[0, -1].double()
        return float(torch.softmax(logits[[no, yes]], 0)[1])

    options: dict[str, Any] = {"classifier_from_token": ("n", "y")}
    async with serving(folder, chat_template=TEMPLATE, **options) as client:
        answer = await client.post("rerank", query=QUERY, documents=TEXTS)
    prompts = [f"<query>: {QUERY}\n<document>: {text}\n" for text in TEXTS]
    told = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([told[i] for i in range(len(TEXTS))], [*map(relevance, prompts)], atol=TOLERANCE)


async def test_over_redis_and_as_jobs(tmp_path: Path, redis_url: str, redis_names: Names) -> None:
    """The same scores over Redis Streams, by HTTP and as jobs; a job for what the model does not do is refused."""
    folder = make_encoder(tmp_path, "bert", classifies=True, num_labels=1)
    bodies = {
        "/v1/score": {"text_1": QUERY, "text_2": TEXTS}, "/rerank": {"query": QUERY, "documents": TEXTS},
        "/v1/embeddings": {"input": "a"}, "/classify": {"input": TEXTS}, "/pooling": {"input": TEXTS},
    }  # fmt: skip
    async with (
        serving(folder, open_bus=lambda _: RedisBus(redis_url, redis_names), name=redis_names.deployment) as client,
        redis.asyncio.from_url(redis_url) as connection,
    ):
        scores = (await client.post("score", **bodies["/v1/score"]))["data"]
        for url, body in bodies.items():
            line = {"custom_id": url, "method": "POST", "url": url, "body": body}
            await connection.xadd(redis_names.jobs, {"request": json.dumps(line)})

        async def all_answered() -> bool:
            return bool(await connection.xlen(redis_names.job_results) == len(bodies))

        await eventually(all_answered)
        entries = await connection.xrange(redis_names.job_results)
    lines = [json.loads(fields[b"result"]) for _, fields in entries]
    found = {line["custom_id"]: line["response"] for line in lines}
    told = [each["score"] for each in found["/v1/score"]["body"]["data"]]
    assert told == pytest.approx([each["score"] for each in scores])
    ranked = {each["index"]: each["relevance_score"] for each in found["/rerank"]["body"]["results"]}
    assert [ranked[index] for index in range(len(TEXTS))] == pytest.approx([each["score"] for each in scores])
    classes = [each["probs"] for each in found["/classify"]["body"]["data"]]
    np.testing.assert_allclose([each["data"] for each in found["/pooling"]["body"]["data"]], classes, atol=TOLERANCE)
    assert (found["/v1/embeddings"]["status_code"], found["/v1/embeddings"]["body"]["error"]["reason"]) == (
        400, "unsupported_task",
    )  # fmt: skip


CURL = re.compile(r"curl -s http://127.0.0.1:8000/(\S+) .*?-d '(.*?)'", re.S)
PAGE = Path(__file__).parents[3] / "docs/pooling.md"


async def test_examples_of_the_page(tmp_path: Path) -> None:
    """What docs/pooling.md shows works, with a model of the kind that its part is about."""
    embeds, ranks = tmp_path / "embeds", tmp_path / "ranks"
    make_encoder(embeds, "xlm-roberta")
    make_encoder(ranks, "xlm-roberta", classifies=True, num_labels=1)
    found = [(path, json.loads(body)) for path, body in CURL.findall(PAGE.read_text())]
    assert {path for path, _ in found} == {"v1/embeddings", "v1/rerank", "v1/score", "classify", "pooling"}
    for folder in (embeds, ranks):
        async with serving(folder) as client:
            for path, body in found:
                if (folder is embeds) == (path == "v1/embeddings"):
                    status, answer = await client.send(path, **body)
                    assert status == 200, answer
