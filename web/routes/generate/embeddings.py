"""``POST /v1/embeddings``: prompts are sent as ordinary requests and come back as their hidden states."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.answers.answer_schemas import COUNT, TEXT, TIME, USAGE, array, record
from pagebus.web.answers.pooled import BYTES, EMBEDDING
from pagebus.web.requests.embeddings import parse_embedding
from pagebus.web.routes import JSON, About, Route
from pagebus.web.routes.generate.generation import generate


async def embeddings(request: web.Request) -> web.StreamResponse:
    """Turn texts, or conversations, into vectors of length 1.

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
    "chats": {"messages": [[{"role": "user", "content": "A cat"}], [{"role": "user", "content": "A dog"}]]},
    "bytes": {"input": "A cat", "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "little"},
}
EMBEDDINGS_ABOUT = About(
    tag="Embeddings", parse=parse_embedding, examples=EXAMPLES, answer=ANSWER, answer_types=(JSON, BYTES)
)
ROUTES = (Route("POST", "/v1/embeddings", "embeddings", embeddings, EMBEDDINGS_ABOUT),)
