"""``POST /v1/embeddings``: prompts go the way of every request, and come back as their hidden states."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from web.answer_schemas import COUNT, TEXT, TIME, USAGE, array, record
from web.calls import Call, Choice
from web.embeddings import embedding, parse_embedding
from web.report import Report
from web.routes import About, Route
from web.routes.generation import Endpoint, generate


class Embedding(Endpoint):
    """Whole answers only: there are no chunks."""

    id_prefix = "embd"
    object = "list"
    parse = staticmethod(parse_embedding)

    def choice(self, choice: Choice) -> dict[str, Any]:
        request = choice.request
        assert request.call.report is not None
        assert request.call.report.embedding is not None
        assert request.prompt is not None
        assert request.prompt.state is not None
        vector = embedding(request.prompt.state, request.call.report.embedding)
        return {"index": choice.index, "object": "embedding", "embedding": vector}

    def reported(self, call: Call, report: Report) -> dict[str, Any]:
        return {"data": [self.choice(choice) for choice in call.choices]}


EMBEDDING = Embedding()


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Turn texts into vectors of length 1.

    They are the model's final hidden states, of the last token or the mean over all (`--pooling-type`).
    """
    return await generate(request, lambda _: EMBEDDING)


ANSWER = record(
    id=TEXT, object={"const": "list"}, created=TIME, model=TEXT, usage=USAGE,
    data=array(
        record(index=COUNT, object={"const": "embedding"}, embedding={"anyOf": [array({"type": "number"}), TEXT]})
    ),
)  # fmt: skip
EXAMPLES: dict[str, dict[str, Any]] = {
    "texts": {"input": ["A cat", "A dog"]},
    "tokens": {"input": [1, 2, 3], "encoding_format": "base64", "dimensions": 8},
}
ROUTES = (
    Route("POST", "/v1/embeddings", "embeddings", embeddings,
          About(tag="Embeddings", parse=parse_embedding, examples=EXAMPLES, answer=ANSWER)),
)  # fmt: skip
