"""``POST /score``, ``/rerank``, ``/classify`` and ``/pooling``: texts compared, ranked, classified and pooled."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.answers.answer_schemas import COUNT, TEXT, TIME, USAGE, array, nullable, record
from pagebus.web.answers.endpoints import RERANK_PATHS, SCORE_PATHS
from pagebus.web.answers.pooled import BYTES, CLASSIFY, POOLING, RERANK, SCORE
from pagebus.web.pooling.classes import parse_classify, parse_pooling
from pagebus.web.pooling.scores import parse_rerank, parse_score
from pagebus.web.routes import JSON, About, Route
from pagebus.web.routes.generate.generation import generate


async def score(request: web.Request) -> web.StreamResponse:
    """Score pairs of texts: by a classifier of pairs, else by the cosine of their embeddings."""
    return await generate(request, lambda _: SCORE)


async def rerank(request: web.Request) -> web.StreamResponse:
    """Rank documents by their relevance to a query, as Jina's and Cohere's routes do."""
    return await generate(request, lambda _: RERANK)


async def classify(request: web.Request) -> web.StreamResponse:
    """Tell how likely each label of the model is for texts."""
    return await generate(request, lambda _: CLASSIFY)


async def pooling(request: web.Request) -> web.StreamResponse:
    """Turn prompts into what the model pools: embeddings, or numbers of labels."""
    return await generate(request, lambda _: POOLING)


NUMBER = {"type": "number"}
HEAD = {"id": TEXT, "object": {"const": "list"}, "created": TIME, "model": TEXT, "usage": USAGE}
SCORES = record(**HEAD, data=array(record(index=COUNT, object={"const": "score"}, score=NUMBER)))
RESULTS = record(
    id=TEXT, model=TEXT, usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    results=array(record(index=COUNT, relevance_score=NUMBER)),
)  # fmt: skip
CLASSES = record(**HEAD, data=array(record(index=COUNT, label=nullable(TEXT), probs=array(NUMBER), num_classes=COUNT)))
POOLED = record(
    **HEAD, data=array(record(index=COUNT, object={"const": "pooling"}, data={"anyOf": [array(NUMBER), TEXT]}))
)
_PLANETS = ["Jupiter is a planet.", {"text": "A planet is no star."}]
SCORE_EXAMPLES: dict[str, dict[str, Any]] = {
    "one and several": {"text_1": "What is Jupiter?", "text_2": ["A planet.", "A dog."]},
    "queries": {"queries": ["What is Jupiter?"], "documents": _PLANETS, "truncate_prompt_tokens": 64},
    "pairs": {"data_1": ["a", "b"], "data_2": ["c", "d"], "use_activation": False},
    "items": {"queries": "a", "items": {"content": [{"type": "text", "text": "b"}]}},
}
RERANK_EXAMPLES: dict[str, dict[str, Any]] = {
    "documents": {"query": "What is Jupiter?", "documents": _PLANETS, "top_n": 1},
    "without texts": {"query": "What is Jupiter?", "documents": ["A planet."], "return_documents": False},
}
TEXTS: dict[str, dict[str, Any]] = {
    "texts": {"input": ["A cat", "A dog"]},
    "tokens": {"input": [1, 2, 3], "use_activation": False},
    "chat": {"messages": [{"role": "user", "content": "A cat"}]},
}
SCORES_ABOUT = About(tag="Embeddings", parse=parse_score, examples=SCORE_EXAMPLES, answer=SCORES)
RERANKS_ABOUT = About(tag="Embeddings", parse=parse_rerank, examples=RERANK_EXAMPLES, answer=RESULTS)


def _named(path: str) -> str:
    """``/v1/score`` -> ``v1_score``."""
    return path.strip("/").replace("/", "_")


ROUTES = (
    *(Route("POST", path, _named(path), score, SCORES_ABOUT) for path in SCORE_PATHS),
    *(Route("POST", path, _named(path), rerank, RERANKS_ABOUT) for path in RERANK_PATHS),
    Route("POST", "/classify", "classify", classify,
          About(tag="Embeddings", parse=parse_classify, examples=TEXTS, answer=CLASSES)),
    Route("POST", "/pooling", "pooling", pooling,
          About(tag="Embeddings", parse=parse_pooling, examples={**TEXTS, "task": {"input": "A cat", "task": "embed"}},
                answer=POOLED, answer_types=(JSON, BYTES))),
)  # fmt: skip
