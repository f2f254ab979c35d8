"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as in vLLM. A tokenizer actor answers, since ingresses have
none.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from aiohttp import web
from msgspec import structs

from pagebus.bus.messages import SamplingParams
from pagebus.web.access.auth import API_KEY
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, array, nullable, record
from pagebus.web.calls.answer_details import PromptInfo, TokenTexts
from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import INT32_MAX
from pagebus.web.requests.lengths import num_bytes
from pagebus.web.requests.openai import parse_prompt, read_model
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt, StreamOptions
from pagebus.web.requests.sampling import token_array
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.routes.generate import examples
from pagebus.web.server.context import BUS_IDS, CONTEXT, REQUEST_ID, REQUEST_ID_GIVEN, bus_request_ids

MAX_IDS = 2**20


def parse_tokenize(data: dict[str, Any], model: ServedModel) -> tuple[ParsedRequest, bool]:
    """The body of ``/tokenize``: a prompt or a chat, and whether the texts of tokens are returned."""
    fields = Fields(data)
    wants_texts = fields.boolean("return_token_strs", False)
    rest = {name: value for name, value in data.items() if name != "return_token_strs"}
    if data.get("messages") is not None:
        return parse_prompt(rest, model), wants_texts
    name, text = read_model(fields, model), fields.string("prompt", None, max_chars=INT32_MAX)
    if text is None:
        raise bad_field("prompt", "is required, or messages in its place")
    special = fields.boolean("add_special_tokens", True)
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return _parsed(name, Prompt(text=text, path="prompt"), special), wants_texts


def parse_detokenize(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """Token ids."""
    fields = Fields(data)
    name, ids = read_model(fields, model), fields.array("tokens", max_items=MAX_IDS)
    if ids is None:
        raise bad_field("tokens", "is required")
    tokens = token_array(ids, "tokens", model.vocab_size)
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return _parsed(name, Prompt(token_ids=tokens, path="tokens"), special=True)


def _parsed(model: str, prompt: Prompt, special: bool) -> ParsedRequest:
    sampling = SamplingParams(skip_special_tokens=False)
    return ParsedRequest(model=model, prompts=(prompt,), sampling=sampling, stream=False,
                 stream_options=StreamOptions(), add_special_tokens=special)  # fmt: skip


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of a chat as the model's template renders it."""
    context = request.app[CONTEXT]
    context.check_ready()
    parsed, wants_texts = await context.bodies.read_as(request, lambda data: parse_tokenize(data, context.model))
    told, names = await ask_tokenizer(request, parsed)
    texts = [names.text(token_id) for token_id in told.ids] if wants_texts else None
    count, most = len(told.tokens), context.model.max_model_len
    return json_response({"count": count, "max_model_len": most, "tokens": told.ids, "token_strs": texts})


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    context = request.app[CONTEXT]
    context.check_ready()
    parsed = await context.bodies.read_as(request, lambda data: parse_detokenize(data, context.model))
    if parsed.prompts[0].token_ids is not None and not len(parsed.prompts[0].token_ids):
        return json_response({"prompt": ""})
    told, _ = await ask_tokenizer(request, parsed)
    return json_response({"prompt": told.text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """The tokenizer's configuration and its chat template, if the server exposes them."""
    info = request.app[CONTEXT].model.tokenizer_info
    if info is None:
        raise ApiError(404, "This server was started without --enable-tokenizer-info-endpoint.", code="not_enabled")
    return json_response(info)


async def ask_tokenizer(request: web.Request, parsed: ParsedRequest) -> tuple[PromptInfo, TokenTexts]:
    """Tokenize the one prompt of a call; returns also the names of its tokens."""
    (prompt,), texts = await ask_for_all(request, parsed)
    return prompt, texts


async def ask_for_all(request: web.Request, parsed: ParsedRequest) -> tuple[list[PromptInfo], TokenTexts]:
    """Tokenize each prompt of a call."""
    context, key = request.app[CONTEXT], request[API_KEY]
    sampling = SamplingParams(max_tokens=1, skip_special_tokens=parsed.sampling.skip_special_tokens)
    parsed, room = replace(parsed, sampling=sampling), parsed.sampling.max_tokens
    with context.admission.admitted(key, parsed, context.model):
        public_id, count = f"tok-{request[REQUEST_ID]}", len(parsed.prompts)
        ids = bus_request_ids(public_id, given=request[REQUEST_ID_GIVEN], count=count)
        messages = [
            structs.replace(each, tokens_only=True, return_token_offsets=parsed.token_offsets,
                    sampling=structs.replace(sampling, max_tokens=room))
            for each in parsed.messages_for_bus(ids, context.address, time.time())
        ]  # fmt: skip
        call = context.inbox.submit(
            messages, parsed.names_by_prompt, streaming=False, num_bytes=num_bytes(parsed, None)
        )
        request[BUS_IDS] = ids
        try:
            await call.finished()
            told = [each.prompt for each in call.requests if each.prompt is not None]
            return told, call.texts
        finally:
            context.inbox.close(call, delivered=True)


TOKENS = record(count=COUNT, max_model_len=nullable(COUNT), tokens=array(COUNT), token_strs=nullable(array(TEXT)))
ROUTES = (
    Route("POST", "/tokenize", "tokenize", tokenize,
          About(tag="Tokens", forms=(About(parse=parse_tokenize, examples=examples.TOKENIZED),
                                     About(parse=parse_tokenize, examples=examples.TOKENIZED_CHATS)), answer=TOKENS)),
    Route("POST", "/detokenize", "detokenize", detokenize,
          About(tag="Tokens", parse=parse_detokenize, examples={"tokens": {"tokens": [1, 2, 3]}},
                answer=record(prompt=TEXT))),
    Route("GET", "/tokenizer_info", "tokenizer_info", tokenizer_info, About(tag="Tokens", answer=OBJECT)),
)  # fmt: skip
