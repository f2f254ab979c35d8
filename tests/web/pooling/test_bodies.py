"""What ``/score``, ``/rerank``, ``/classify`` and ``/pooling`` take and refuse, for models of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.web.calls.pooled_forms import activated, cosine
from pagebus.web.http.errors import ApiError
from pagebus.web.pooling.classes import parse_classify, parse_pooling
from pagebus.web.pooling.scores import parse_rerank, parse_score
from pagebus.web.pooling.tasks import check_task
from pagebus.web.requests.embeddings import parse_embedding
from pagebus.web.requests.openai import parse_completion
from tests.web.fake_backend import MODEL

RERANKER = replace(MODEL, pooler=Pooler("cls", labels=("LABEL_0",), joined=False), pooling="cls", in_one_step=True)
JOINED = replace(MODEL, pooler=Pooler(labels=("LABEL_0",)))
TEMPLATED = replace(JOINED, has_score_template=True)
EMBEDDER = replace(MODEL, pooler=Pooler("mean", normalize=False), pooling="mean")
CLASSIFIER = replace(MODEL, pooler=Pooler("cls", labels=("a", "b"), activation="softmax"), pooling="cls")


def test_pairs_of_each_kind() -> None:
    """With a separator, one text behind the other, by a template; and texts apart, to be compared."""
    body = {"text_1": "q", "text_2": ["d", "e"]}
    separated, joined, templated, apart = (parse_score(body, each) for each in (RERANKER, JOINED, TEMPLATED, MODEL))
    assert [(each.text, each.second_text) for each in separated.prompts] == [("q", "d"), ("q", "e")]
    assert [each.text for each in joined.prompts] == ["qd", "qe"]
    assert [each.messages for each in templated.prompts][1] == (
        {"role": "query", "content": "q"}, {"role": "document", "content": "e"},
    )  # fmt: skip
    assert [each.text for each in apart.prompts] == ["q", "d", "e"]
    assert (separated.sampling.pooling, separated.sampling.in_one_step, separated.sampling.max_tokens) == (
        "cls",
        True,
        1,
    )
    assert separated.details is not None
    assert separated.details.score is not None
    assert separated.details.score.num_queries is None


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_both_sides_by_any_name(names: tuple[str, str]) -> None:
    """As many on both sides are paired one by one."""
    parsed = parse_score(
        {names[0]: ["a", {"text": "b"}], names[1]: ["c", {"content": [{"type": "text", "text": "d"}]}]}, RERANKER
    )
    assert [(each.text, each.second_text) for each in parsed.prompts] == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"documents": "a"}, "queries"),
        ({"data_1": "a"}, "data_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": [], "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": 5}, "text_2"),
        ({"text_1": "a", "text_2": ["b", {"image": "x"}]}, "text_2[1]"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ({"text_1": "a", "text_2": "b", "texts": "x"}, "texts"),
        ({"text_1": "a", "text_2": "b", "queries": "x"}, "queries"),
    ],
)
def test_scores_that_are_refused(body: dict[str, Any], param: str) -> None:
    """By the field at fault."""
    with pytest.raises(ApiError) as caught:
        parse_score(body, RERANKER)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_rankings() -> None:
    """Documents are kept for the answer; a field of none of the APIs is refused."""
    parsed = parse_rerank(
        {"query": "q", "documents": ["d", {"text": "e"}], "top_n": 1, "return_documents": False}, RERANKER
    )
    assert parsed.details is not None
    assert parsed.details.score is not None
    form = parsed.details.score
    assert (form.documents, form.top_n, form.with_texts) == (("d", "e"), 1, False)
    for body, param in (
        ({"query": "q"}, "documents"),
        ({"documents": ["d"]}, "query"),
        ({"query": "q", "documents": ["d"], "top_n": -1}, "top_n"),
    ):
        with pytest.raises(ApiError) as caught:
            parse_rerank(body, RERANKER)
        assert caught.value.param == param


def test_templates_get_an_instruction() -> None:
    """Besides what else they are told."""
    body = {"query": "q", "documents": ["d"], "instruction": "Judge.", "chat_template_kwargs": {"a": 1}}
    assert parse_rerank(body, TEMPLATED).chat_template_kwargs == {"instruction": "Judge.", "a": 1}


def test_what_pooling_answers() -> None:
    """Embeddings as the model's files say, or a classifier's numbers; single tokens have none."""
    for model, wanted in ((EMBEDDER, None), (CLASSIFIER, ("a", "b"))):
        details = parse_pooling({"input": "x"}, model).details
        assert details is not None
        assert details.embedding is not None
        assert (details.classes.labels if details.classes else None) == wanted
        assert details.embedding.normalize is False
    with pytest.raises(ApiError, match="task"):
        parse_pooling({"input": "x", "task": "token_embed"}, EMBEDDER)
    raw = parse_classify({"input": "x", "use_activation": False}, CLASSIFIER).details
    assert raw is not None
    assert raw.classes is not None
    assert raw.classes.activation == "none"


@pytest.mark.parametrize(
    ("parse", "body", "serves"),
    [
        (parse_completion, {"prompt": "x"}, (MODEL,)),
        (parse_embedding, {"input": "x"}, (MODEL, EMBEDDER)),
        (parse_score, {"text_1": "a", "text_2": "b"}, (MODEL, EMBEDDER, RERANKER)),
        (parse_classify, {"input": "x"}, (CLASSIFIER, RERANKER)),
    ],
)
def test_who_serves_what(parse: Any, body: dict[str, Any], serves: tuple[Any, ...]) -> None:
    """Others refuse it, by the name of the API."""
    for model in (MODEL, EMBEDDER, RERANKER, CLASSIFIER):
        parsed = parse(body, model)
        if model in serves:
            check_task(parsed, model)
            continue
        with pytest.raises(ApiError, match="API") as caught:
            check_task(parsed, model)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_task")


def test_numbers() -> None:
    """Probabilities of any numbers, without an overflow; a vector of zeros is like none."""
    numbers = np.array([-1e9, 0, 1e9], np.float32)
    assert activated(numbers, "sigmoid") == pytest.approx([0, 0.5, 1])
    assert activated(numbers, "softmax") == pytest.approx([0, 0, 1])
    assert activated(numbers, "none") == pytest.approx(numbers.tolist())
    assert cosine(np.array([3, 4], np.float32), np.array([4, 3], np.float32)) == pytest.approx(0.96)
    assert cosine(np.zeros(2, np.float32), np.ones(2, np.float32)) == 0
