"""Endpoints whose answers are made of prompts' pooled states: embeddings, scores, rankings, classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiohttp import web

from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.sse import usage_of
from pagebus.web.calls.answer_details import AnswerDetails, EmbeddingForm, Float32Array
from pagebus.web.calls.call import Call, Choice
from pagebus.web.calls.pooled_forms import ScoreForm, activated, cosine
from pagebus.web.pooling.classes import parse_classify, parse_pooling
from pagebus.web.pooling.scores import parse_rerank, parse_score
from pagebus.web.requests.embeddings import as_bytes, as_json, metadata, parse_embedding, state_of, vector_of

BYTES = "application/octet-stream"


class Embedding(Endpoint):
    """Whole answers only: there are no chunks."""

    id_prefix = "embd-"
    object = "list"
    item, field = "embedding", "embedding"
    parse = staticmethod(parse_embedding)

    def choice(self, choice: Choice) -> dict[str, Any]:
        vector, form = self.vector(choice), form_of(choice.request.call)
        return {"index": choice.index, "object": self.item, self.field: as_json(vector, form)}

    def vector(self, choice: Choice) -> Float32Array:
        """What is told of a prompt."""
        return vector_of(_state(choice), form_of(choice.request.call))

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        return {"data": [self.choice(choice) for choice in call.choices]}

    def response(self, call: Call, public_id: str, created_s: int, model: str) -> web.Response:
        form = form_of(call)
        if not form.is_body:
            return super().response(call, public_id, created_s, model)
        body, told = as_bytes([self.vector(choice) for choice in call.choices], form)
        head = {"id": public_id, "created": created_s, "model": model}
        headers = {"metadata": metadata(head, told, usage_of(call.requests))} if form.encoding == "bytes" else {}
        return web.Response(body=body, content_type=BYTES, headers=headers)


class Pooling(Embedding):
    """Embeddings, or a classifier's numbers, in one shape."""

    id_prefix = "pool-"
    item, field = "pooling", "data"
    parse = staticmethod(parse_pooling)

    def vector(self, choice: Choice) -> Float32Array:
        details = choice.request.call.details
        if details is None or details.classes is None:
            return super().vector(choice)
        return np.array(activated(_state(choice), details.classes.activation), np.float32)


class Classify(Endpoint):
    """The likeliest label of each text, and the probabilities of all."""

    id_prefix = "classify-"
    object = "list"
    parse = staticmethod(parse_classify)

    def choice(self, choice: Choice) -> dict[str, Any]:
        details = choice.request.call.details
        assert details is not None
        assert details.classes is not None
        labels, probs = details.classes.labels, activated(_state(choice), details.classes.activation)
        label = labels[max(range(len(probs)), key=probs.__getitem__)]
        return {"index": choice.index, "label": label, "probs": probs, "num_classes": len(probs)}

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        return {"data": [self.choice(choice) for choice in call.choices]}


class Score(Endpoint):
    """A score for each pair of texts."""

    id_prefix = "score-"
    object = "list"
    parse = staticmethod(parse_score)

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError  # a score may be of two prompts

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        scores = enumerate(scores_of(call, score_form(details)))
        return {"data": [{"index": index, "object": "score", "score": score} for index, score in scores]}


class Rerank(Score):
    """Documents, the most relevant one first, as Jina and Cohere have it."""

    id_prefix = "rerank-"
    parse = staticmethod(parse_rerank)

    def answer(self, call: Call, public_id: str, created_s: int, model: str) -> dict[str, Any]:
        assert call.details is not None
        form, usage = score_form(call.details), usage_of(call.requests)
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return {"id": public_id, "model": model, "usage": counts, "results": _ranked(call, form)}


def _ranked(call: Call, form: ScoreForm) -> list[dict[str, Any]]:
    """The best documents first; of equal ones the first."""
    scores = scores_of(call, form)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: form.top_n or None]
    texts = [{"document": {"text": text, "multi_modal": None}} if form.with_texts else {} for text in form.documents]
    return [{"index": index, **texts[index], "relevance_score": scores[index]} for index in order]


def scores_of(call: Call, form: ScoreForm) -> list[float]:
    """Of each pair: a classifier's only number, or the cosine of two embeddings."""
    states = [_state(choice) for choice in call.choices]
    if form.num_queries is None:
        return [activated(state, form.activation)[0] for state in states]
    queries, others = states[: form.num_queries], states[form.num_queries :]
    queries = queries * len(others) if len(queries) == 1 else queries
    return [cosine(query, other) for query, other in zip(queries, others, strict=True)]


def score_form(details: AnswerDetails) -> ScoreForm:
    """The form of a call's scores."""
    assert details.score is not None
    return details.score


def form_of(call: Call) -> EmbeddingForm:
    """The form of a call's embeddings."""
    assert call.details is not None
    assert call.details.embedding is not None
    return call.details.embedding


def _state(choice: Choice) -> Float32Array:
    return state_of(choice.request.prompt)


EMBEDDING, POOLING, CLASSIFY, SCORE, RERANK = Embedding(), Pooling(), Classify(), Score(), Rerank()
