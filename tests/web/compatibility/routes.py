"""The routes besides chats and completions in ``docs/compatibility``: their fields, and bodies that use them.

Which fields there are comes from the types of OpenAI's and Anthropic's clients, and from vLLM's protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import (
    batch_create_params,
    batch_list_params,
    embedding_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.responses import input_item_list_params, response_create_params, response_retrieve_params

from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.web.adapters.messages import read_count, read_message
from pagebus.web.adapters.response_input import parse_kept, read_response
from pagebus.web.answers.derendered import parse_derender_chat, parse_derender_completion
from pagebus.web.app import ROUTES
from pagebus.web.pooling.classes import parse_classify, parse_pooling
from pagebus.web.pooling.scores import parse_rerank, parse_score
from pagebus.web.requests.embeddings import parse_embedding
from pagebus.web.requests.token_body import parse_generate
from pagebus.web.routes.body_schema import Parser, body_schema
from pagebus.web.routes.generate.messages import parse_count, parse_message
from pagebus.web.routes.generate.tokens import parse_detokenize, parse_tokenize
from pagebus.web.routes.operate.aborts import parse_abort
from pagebus.web.routes.operate.adapters import parse_load, parse_unload
from pagebus.web.routes.store.batches import EXAMPLE as BATCH
from pagebus.web.routes.store.batches import parse_batch
from tests.vllm_names import fields_of as vllm_fields
from tests.web.fake_backend import MODEL

ANY = replace(MODEL, priorities=True, request_templates=True, has_score_template=True, pooler=Pooler(labels=("yes",)))
"""A server that was started with all that fields may need."""


@dataclass(frozen=True)
class Body:
    """The fields of a route's body. ``api``: those of its inventor's client, ``vllm``: those that vLLM adds, ``own``:
    ours. ``read`` tells what it takes (and only reads the route's own shape), ``parse`` is the whole of it."""

    path: str
    inventor: str
    api: frozenset[str]
    vllm: frozenset[str]
    read: Parser
    parse: Parser
    samples: tuple[Mapping[str, Any], ...]
    """Valid bodies: between them they use every field that is served."""
    own: frozenset[str] = frozenset()
    only_listed: bool = False
    """Whether the parser takes more, which the page does not list."""
    also: tuple[str, ...] = ()
    """Other paths that take the same."""

    def known(self) -> Mapping[str, Any]:
        """Schemas of the fields that are served."""
        schemas: Mapping[str, Any] = body_schema(self.read, [dict(each) for each in self.samples], ANY)["properties"]
        listed = self.api | self.vllm | self.own
        return {name: schema for name, schema in schemas.items() if name in listed or not self.only_listed}


@dataclass(frozen=True)
class Query:
    """The parameters of a route that has no body."""

    path: str
    api: frozenset[str]


def fields_of(*types: Any) -> frozenset[str]:
    """The names of all parameters of a client."""
    return frozenset(name for each in types for name in get_type_hints(each))


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BETA = words("context_management mcp_servers thread")
"""Of the beta of Anthropic's API, that clients send most."""
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = Body(
    path="/v1/responses",
    inventor="OpenAI",
    api=fields_of(
        response_create_params.ResponseCreateParamsNonStreaming, response_create_params.ResponseCreateParamsStreaming
    ),
    vllm=vllm_fields("POST /v1/responses"),
    read=lambda data, model: read_response(data, allow_unknown=model.allow_unknown_fields),
    parse=lambda data, model: parse_kept(read_response(data).kept([]), model),
    samples=(
        {
            "input": "Hi", "instructions": "Be brief", "model": MODEL.name, "background": True, "store": True,
            "stream": True, "stream_options": {}, "max_output_tokens": 5, "metadata": {"a": "b"},
            "parallel_tool_calls": True, "previous_response_id": "resp_1", "prompt_cache_key": "k",
            "prompt_cache_retention": "24h", "reasoning": {"effort": "low"}, "safety_identifier": "s",
            "service_tier": "auto", "temperature": 0.5, "top_p": 0.9, "tools": [FUNCTION],
            "tool_choice": {"type": "function", "name": "f"}, "user": "u", "timeout": 9.0, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
        {
            "input": "Hi", "text": {"format": {"type": "json_object"}}, "cache_salt": "s",
            "chat_template_kwargs": {"a": 1}, "frequency_penalty": 0.5, "presence_penalty": 0.5, "ignore_eos": False,
            "include_reasoning": True, "include_stop_str_in_output": True, "logit_bias": {"5": 1}, "min_p": 0.1,
            "priority": 1, "repetition_penalty": 1.1, "seed": 1, "skip_special_tokens": False,
            "spaces_between_special_tokens": False, "stop": ["x"], "stop_token_ids": [7], "top_k": 5,
        },
        {"input": "Hi", "structured_outputs": {"choice": ["a", "b"]}},
        {"input": "Hi", "min_tokens": 1},
    ),
    own=words("timeout"),
)  # fmt: skip
_MESSAGE: dict[str, Any] = {
    **CHAT, "model": MODEL.name, "system": "Be brief", "cache_control": {"type": "ephemeral"},
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
    "chat_template_kwargs": {"a": 1}, "thinking": {"type": "disabled"}, "context_management": {"edits": []},
}  # fmt: skip
_FORMAT = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
MESSAGE = Body(
    path="/v1/messages",
    inventor="Anthropic",
    api=fields_of(
        message_create_params.MessageCreateParamsNonStreaming, message_create_params.MessageCreateParamsStreaming
    )
    | BETA,
    vllm=vllm_fields("POST /v1/messages"),
    read=lambda data, model: read_message(data, allow_unknown=model.allow_unknown_fields),
    parse=parse_message,
    samples=(
        {
            **_MESSAGE, "max_tokens": 5, "stop_sequences": ["x"], "stream": True, "metadata": {"user_id": "u"},
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "cache_salt": "s",
        },
        {**CHAT, "max_tokens": 5, **_FORMAT},
    ),
)  # fmt: skip
COUNT = Body(
    path="/v1/messages/count_tokens",
    inventor="Anthropic",
    api=fields_of(message_count_tokens_params.MessageCountTokensParams) | BETA,
    vllm=vllm_fields("POST /v1/messages/count_tokens"),
    read=lambda data, model: read_count(data, allow_unknown=model.allow_unknown_fields),
    parse=parse_count,
    samples=({**_MESSAGE, **_FORMAT},),
)
EMBEDDING = Body(
    path="/v1/embeddings",
    inventor="OpenAI",
    api=fields_of(embedding_create_params.EmbeddingCreateParams),
    vllm=vllm_fields("POST /v1/embeddings"),
    read=parse_embedding,
    parse=parse_embedding,
    samples=(
        {
            "input": ["a", "b"], "model": MODEL.name, "encoding_format": "base64", "dimensions": 4, "user": "u",
            "add_special_tokens": False, "cache_salt": "s", "priority": 1, "truncate_prompt_tokens": 3, "timeout": 9.0,
            "request_id": "r", "truncation_side": "left", "embed_dtype": "float16", "endianness": "big",
            "use_activation": False,
        },
        {
            **CHAT, "add_generation_prompt": True, "continue_final_message": False, "chat_template": "x",
            "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low",
        },
    ),
    own=words("timeout"),
)  # fmt: skip
_COMMON: dict[str, Any] = {
    "model": MODEL.name, "user": "u", "cache_salt": "s", "priority": 1, "truncate_prompt_tokens": 3,
    "truncation_side": "left", "timeout": 9.0, "request_id": "r", "use_activation": False,
}  # fmt: skip
_CHATS = EMBEDDING.samples[1]
_INPUT: dict[str, Any] = {**_COMMON, "input": ["a", "b"], "add_special_tokens": False}
_INSTRUCTED = {**_COMMON, "instruction": "i", "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}
SCORE = Body(
    path="/score",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /score"),
    read=parse_score,
    parse=parse_score,
    samples=(
        {"text_1": "a", "text_2": ["b"], **_INSTRUCTED}, {"data_1": "a", "data_2": "b"},
        {"queries": "a", "documents": "b"}, {"queries": "a", "items": "b"},
    ),
    own=words("timeout reasoning_effort"),
    also=("/v1/score",),
)  # fmt: skip
RERANK = Body(
    path="/rerank",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /rerank"),
    read=parse_rerank,
    parse=parse_rerank,
    samples=({"query": "a", "documents": ["b"], "top_n": 1, "return_documents": False, **_INSTRUCTED},),
    own=words("timeout return_documents reasoning_effort"),
    also=("/v1/rerank", "/v2/rerank"),
)
CLASSIFY = Body(
    path="/classify",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /classify"),
    read=parse_classify,
    parse=parse_classify,
    samples=(_INPUT, _CHATS),
    own=words("timeout reasoning_effort"),
)
POOLING = Body(
    path="/pooling",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /pooling"),
    read=parse_pooling,
    parse=parse_pooling,
    samples=(
        {**_INPUT, "task": "embed", "encoding_format": "base64", "embed_dtype": "float16", "endianness": "big",
         "dimensions": 4},
        _CHATS,
    ),
    own=words("timeout reasoning_effort normalize"),
)  # fmt: skip
TOKENIZE = Body(
    path="/tokenize",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /tokenize"),
    read=parse_tokenize,
    parse=parse_tokenize,
    samples=(
        {"prompt": "a", "model": MODEL.name, "add_special_tokens": False, "return_token_strs": True},
        {
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "Oh"}], "add_generation_prompt": False,
            "continue_final_message": True, "chat_template": "{{ messages }}", "chat_template_kwargs": {"a": 1},
            "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none",
        },
    ),
    only_listed=True,
)  # fmt: skip
DETOKENIZE = Body(
    path="/detokenize",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /detokenize"),
    read=parse_detokenize,
    parse=parse_detokenize,
    samples=({"model": MODEL.name, "tokens": [1, 2]},),
)
BATCHES = Body(
    path="/v1/batches",
    inventor="OpenAI",
    api=fields_of(batch_create_params.BatchCreateParams),
    vllm=frozenset(),
    read=parse_batch,
    parse=parse_batch,
    samples=(BATCH,),
)
ABORT = Body(
    path="/abort_requests",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /abort_requests"),
    read=parse_abort,
    parse=parse_abort,
    samples=({"request_ids": ["chatcmpl-1"]}, {"idempotency_keys": ["1"]}),
)
LOAD = Body(
    path="/v1/load_lora_adapter",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /v1/load_lora_adapter"),
    read=parse_load,
    parse=parse_load,
    samples=({"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": True},),
)
UNLOAD = Body(
    path="/v1/unload_lora_adapter",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /v1/unload_lora_adapter"),
    read=parse_unload,
    parse=parse_unload,
    samples=({"lora_name": "sql"},),
)
_ANSWER = {"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": "stop"}]}
GENERATE = Body(
    path="/inference/v1/generate",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /inference/v1/generate"),
    read=parse_generate,
    parse=parse_generate,
    samples=(
        {
            "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}, "model": MODEL.name, "request_id": "r",
            "cache_salt": "s", "priority": 1, "stream": True, "stream_options": {"include_usage": True},
            "token_offsets": [[0, 1]], "parse_context": {}, "return_token_ids": True, "reasoning_parser_kwargs": {},
            "reasoning_ended": True,
        },
    ),
)  # fmt: skip
DERENDER_CHAT = Body(
    path="/v1/chat/completions/derender",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /v1/chat/completions/derender"),
    read=parse_derender_chat,
    parse=parse_derender_chat,
    samples=(
        {"generate_response": _ANSWER, "chat_request": CHAT, "prompt_tokens": 2, "prompt_token_ids": [3, 4],
         "model": MODEL.name},
    ),
)  # fmt: skip
DERENDER_COMPLETION = Body(
    path="/v1/completions/derender",
    inventor="vLLM",
    api=frozenset(),
    vllm=vllm_fields("POST /v1/completions/derender"),
    read=parse_derender_completion,
    parse=parse_derender_completion,
    samples=(
        {"generate_responses": [_ANSWER], "completion_request": {"prompt": "a"}, "prompt_tokens": [2],
         "prompt_token_ids": [[3, 4]], "model": MODEL.name},
    ),
)  # fmt: skip
BODIES = (
    RESPONSE, MESSAGE, COUNT, EMBEDDING, SCORE, RERANK, CLASSIFY, POOLING, TOKENIZE, DETOKENIZE, GENERATE,
    DERENDER_CHAT, DERENDER_COMPLETION, ABORT, LOAD, UNLOAD, BATCHES,
)  # fmt: skip
FILE = fields_of(file_create_params.FileCreateParams)
"""Of a form, which ``POST /v1/files`` gets: all are served."""
QUERIES = (
    Query("/v1/files", fields_of(file_list_params.FileListParams)),
    Query("/v1/batches", fields_of(batch_list_params.BatchListParams)),
    Query(
        "/v1/responses/{response_id}",
        fields_of(
            response_retrieve_params.ResponseRetrieveParamsNonStreaming,
            response_retrieve_params.ResponseRetrieveParamsStreaming,
        ),
    ),
    Query("/v1/responses/{response_id}/input_items", fields_of(input_item_list_params.InputItemListParams)),
)


def served_query(query: Query) -> frozenset[str]:
    """The parameters that the route says it takes."""
    (route,) = (route for route in ROUTES if (route.method, route.path) == ("GET", query.path))
    return frozenset(route.about.query)
