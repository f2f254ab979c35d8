"""``.../render`` turns a request into its tokens; ``.../derender`` turns tokens of an answer into the answer.

Both work without executors, so that :mod:`pagebus.web.routes.generate.inference` can run in another deployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from msgspec import structs

from pagebus.bus.messages import SamplingParams
from pagebus.web.adapters.response_input import parse_response
from pagebus.web.answers.answer_schemas import CHAT, COMPLETION, COUNT, OBJECT, TEXT, array, nullable, record
from pagebus.web.answers.derendered import (
    Derender,
    chat_choices,
    completion_choices,
    parse_derender_chat,
    parse_derender_completion,
)
from pagebus.web.answers.rendered import parameters, rendered
from pagebus.web.http.fields import Schema
from pagebus.web.http.limits import MANY_PROMPTS
from pagebus.web.http.offload import offload
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt, StreamOptions
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.routes.generate import examples
from pagebus.web.routes.generate.messages import parse_message
from pagebus.web.routes.generate.tokens import ask_for_all
from pagebus.web.server.context import CONTEXT, REQUEST_ID, REQUEST_ID_GIVEN

Parse = Callable[[dict[str, Any], ServedModel], Any]


async def render_chat(request: web.Request) -> web.Response:
    """The tokens of a chat, as `/inference/v1/generate` takes them."""
    return json_response((await _render(request, parse_chat, "chatcmpl"))[0])


async def render_completion(request: web.Request) -> web.Response:
    """The tokens of each prompt of a completion, as `/inference/v1/generate` takes them."""
    told = await _render(request, parse_completion, "cmpl")
    return await offload(lambda: json_response(told), long=len(told) > MANY_PROMPTS)


async def render_message(request: web.Request) -> web.Response:
    """The tokens of a message of Anthropic's API, as `/inference/v1/generate` takes them."""
    return json_response((await _render(request, parse_message, "msg"))[0])


async def render_response(request: web.Request) -> web.Response:
    """The tokens of a response, as `/inference/v1/generate` takes them; of one that goes on from no other."""
    return json_response((await _render(request, parse_response, "resp"))[0])


async def derender_chat(request: web.Request) -> web.Response:
    """Turn an answer of `/inference/v1/generate` into a chat's answer: its text, tool calls and reasoning."""
    derender, texts = await _derender(request, parse_derender_chat)
    choices = chat_choices(derender, texts)
    return json_response(_answer(derender, "chat.completion", choices))


async def derender_completion(request: web.Request) -> web.Response:
    """Turn answers of `/inference/v1/generate` into a completion's answer, one for each prompt."""
    derender, texts = await _derender(request, parse_derender_completion)
    choices = completion_choices(derender, texts)
    return json_response(_answer(derender, "text_completion", choices))


async def _render(request: web.Request, parse: Parse, prefix: str) -> list[dict[str, Any]]:
    context = request.app[CONTEXT]
    context.check_ready()
    parsed = await context.bodies.read_as(request, lambda data: parse(data, context.model))
    if parsed.request_id is not None and not request[REQUEST_ID_GIVEN]:
        request[REQUEST_ID], request[REQUEST_ID_GIVEN] = parsed.request_id, True
    sampling_params = parameters(parsed)
    told, _ = await ask_for_all(request, parsed)
    public_id = f"{prefix}-{request[REQUEST_ID]}"
    names = [public_id] if len(told) == 1 else [f"{public_id}-{index}" for index in range(len(told))]
    return [rendered(parsed, name, prompt, sampling_params) for name, prompt in zip(names, told, strict=True)]


async def _derender(request: web.Request, parse: Parse) -> tuple[Derender, list[str]]:
    """The answer to decode, and the text of each choice: the text after that of the last prompt tokens."""
    context = request.app[CONTEXT]
    context.check_ready()
    derender: Derender = await context.bodies.read_as(request, lambda data: parse(data, context.model))
    prompts = [list(choice.tail) + more for choice in derender.choices for more in (choice.ids, [])]
    sampling = derender.parsed.sampling if derender.parsed is not None else SamplingParams()
    parsed = ParsedRequest(
        model=derender.model,
        prompts=tuple(Prompt(token_ids=np.array(ids, np.int32), path="token_ids") for ids in prompts if ids),
        sampling=structs.replace(SamplingParams(), skip_special_tokens=sampling.skip_special_tokens), stream=False,
        stream_options=StreamOptions(), add_special_tokens=False,
    )  # fmt: skip
    told = iter((await ask_for_all(request, parsed))[0] if parsed.prompts else ())
    texts = [next(told).text if ids else "" for ids in prompts]
    return derender, [text.removeprefix(before) for text, before in zip(texts[::2], texts[1::2], strict=True)]


def _answer(derender: Derender, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    prompt, output = derender.num_prompt_tokens, sum(len(choice.ids) for choice in derender.choices)
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    head = {"id": derender.request_id, "object": kind, "created": int(time.time()), "model": derender.model}
    return {**head, "choices": choices, "usage": usage}


RENDERED = record(request_id=TEXT, token_ids=array(COUNT), token_offsets=nullable(array(array(COUNT))),
                  sampling_params=OBJECT, model=TEXT)  # fmt: skip


def _about(parse: Parse, bodies: examples.Examples, answer: Schema) -> About:
    return About(tag="Tokens", parse=parse, examples=bodies, answer=answer)


ROUTES = (
    Route("POST", "/v1/chat/completions/render", "render_chat", render_chat,
          _about(parse_chat, examples.CHATS, RENDERED)),
    Route("POST", "/v1/completions/render", "render_completion", render_completion,
          _about(parse_completion, examples.COMPLETIONS, array(RENDERED))),
    Route("POST", "/v1/messages/render", "render_message", render_message,
          _about(parse_message, examples.MESSAGES, RENDERED)),
    Route("POST", "/v1/responses/render", "render_response", render_response,
          _about(parse_response, examples.RESPONSES, RENDERED)),
    Route("POST", "/v1/chat/completions/derender", "derender_chat", derender_chat,
          _about(parse_derender_chat, examples.DERENDERED_CHATS, CHAT)),
    Route("POST", "/v1/completions/derender", "derender_completion", derender_completion,
          _about(parse_derender_completion, examples.DERENDERED_COMPLETIONS, COMPLETION)),
)  # fmt: skip
