"""``POST /v1/embeddings``: prompts go the way of every request, and come back as their hidden states."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from web.answer_schemas import COUNT, TEXT, TIME, USAGE, array, record
from web.calls import Call, Choice
from web.embeddings import as_bytes, embedding, metadata, parse_embedding, state_of
from web.report import EmbeddingForm, Report
from web.routes import JSON, About, Route
from web.routes.generation import Endpoint, generate
from web.sse import usage_of

BYTES = "application/octet-stream"


class Embedding(Endpoint):
    """Whole answers only: there are no chunks."""

    id_prefix = "embd-"
    object = "list"
    parse = staticmethod(parse_embedding)

    def choice(self, choice: Choice) -> dict[str, Any]:
        vector = embedding(state_of(choice.request.prompt), form_of(choice.request.call))
        return {"index": choice.index, "object": "embedding", "embedding": vector}

    def reported(self, call: Call, report: Report) -> dict[str, Any]:
        return {"data": [self.choice(choice) for choice in call.choices]}

    def response(self, call: Call, public_id: str, created_s: int, model: str) -> web.Response:
        form = form_of(call)
        if not form.is_body:
            return super().response(call, public_id, created_s, model)
        body, told = as_bytes(call, form)
        head = {"id": public_id, "created": created_s, "model": model}
        headers = {"metadata": metadata(head, told, usage_of(call.requests))} if form.encoding == "bytes" else {}
        return web.Response(body=body, content_type=BYTES, headers=headers)


def form_of(call: Call) -> EmbeddingForm:
    """How the embeddings of a call are told."""
    assert call.report is not None
    assert call.report.embedding is not None
    return call.report.embedding


EMBEDDING = Embedding()


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Turn texts, or a conversation, into vectors of length 1.

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
    "chat": {"messages": [{"role": "user", "content": "A cat"}], "chat_template_kwargs": {"enable_thinking": False}},
    "bytes": {"input": "A cat", "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "little"},
}
ROUTES = (
    Route("POST", "/v1/embeddings", "embeddings", embeddings,
          About(tag="Embeddings", parse=parse_embedding, examples=EXAMPLES, answer=ANSWER,
                answer_types=(JSON, BYTES))),
)  # fmt: skip
