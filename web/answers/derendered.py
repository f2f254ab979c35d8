"""Bodies of ``.../derender``: answers of ``/inference/v1/generate`` turned back into answers of a chat or a
completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagebus.web.answers.null_fields import MESSAGE
from pagebus.web.calls.parsing.output import OutputParser
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema, translated, type_name
from pagebus.web.http.limits import INT32_MAX, MAX_CHOICES
from pagebus.web.requests.openai import parse_chat, parse_completion, read_model
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.sampling import check_token_ids, token_id
from pagebus.web.requests.served_model import ServedModel

MAX_ANSWERS = 1024
STREAMS: dict[str, tuple[Any, ...]] = {"stream": (False,), "generate_chunk": (), "stream_state": ()}
"""Only whole answers are derendered; streams come as text from the routes of chats and completions."""
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_IDS: Schema = {"type": ["array", "null"]}
"""Of a prompt; all but the last ones are passed over."""
_FINISHED = ("stop", "length", "repetition")
_STOP: Schema = {"type": ["string", "integer", "null"]}
TAIL_TOKENS = 6
"""Number of last prompt tokens that determine how the first output token is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """One choice of an answer. ``tail``: the end of its prompt."""

    ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    tail: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Derender:
    """An answer to be decoded. ``parsed``: its request, if known."""

    model: str
    request_id: str
    choices: list[TokenChoice]
    num_prompt_tokens: int
    parsed: ParsedRequest | None


def parse_derender_chat(data: dict[str, Any], model: ServedModel) -> Derender:
    """The body of ``POST /v1/chat/completions/derender``."""
    fields = Fields(data)
    name = read_model(fields, model)
    answer = fields.object("generate_response")
    if answer is None:
        raise bad_field("generate_response", "is required")
    request = fields.object("chat_request")
    count, ids = fields.integer("prompt_tokens", 0, 0, INT32_MAX), fields.take("prompt_token_ids", _IDS)
    fields.finish(STREAMS, allow_unknown=model.allow_unknown_fields)
    parsed = _parsed(parse_chat, request, "chat_request", model)
    choices = _choices(answer, ids, "generate_response", model)
    return _derender(name, [answer], choices, count, parsed)


def parse_derender_completion(data: dict[str, Any], model: ServedModel) -> Derender:
    """The body of ``POST /v1/completions/derender``: an answer for each prompt."""
    fields = Fields(data)
    name = read_model(fields, model)
    answers = fields.array("generate_responses", max_items=MAX_ANSWERS)
    if not answers:
        raise bad_field("generate_responses", "is required")
    request = fields.object("completion_request")
    counts = fields.array("prompt_tokens", max_items=MAX_ANSWERS, items=_COUNT) or [0] * len(answers)
    prompts = fields.array("prompt_token_ids", max_items=MAX_ANSWERS, items=_IDS) or [None] * len(answers)
    for field, given in (("prompt_tokens", counts), ("prompt_token_ids", prompts)):
        if len(given) != len(answers):
            raise bad_field(field, f"must have one entry for each of generate_responses ({len(answers)})")
    if any(type(count) is not int or not 0 <= count <= INT32_MAX for count in counts):
        raise bad_field("prompt_tokens", f"must be integers from 0 to {INT32_MAX}")
    fields.finish(STREAMS, allow_unknown=model.allow_unknown_fields)
    parsed = _parsed(parse_completion, request, "completion_request", model)
    choices = [
        choice
        for index, (answer, ids) in enumerate(zip(answers, prompts, strict=True))
        for choice in _choices(answer, ids, f"generate_responses[{index}]", model)
    ]
    if len(choices) > MAX_CHOICES:
        raise bad_field("generate_responses", f"must have at most {MAX_CHOICES} choices together, got {len(choices)}")
    return _derender(name, answers, choices, sum(counts), parsed)


def _parsed(
    parse: Callable[..., ParsedRequest], request: dict[str, Any] | None, field: str, model: ServedModel
) -> ParsedRequest | None:
    """The request that was answered, which is in ``field``."""
    if request is None:
        return None
    with translated(((r"$", field), (r"(?=\w)", f"{field}."))):
        return parse(request, model)


def _derender(
    name: str, answers: Sequence[dict[str, Any]], choices: list[TokenChoice], count: int, parsed: ParsedRequest | None
) -> Derender:
    request_id = answers[0].get("request_id")
    return Derender(
        model=name, request_id=request_id if isinstance(request_id, str) else "derender", choices=choices,
        num_prompt_tokens=count, parsed=parsed,
    )  # fmt: skip


def _choices(answer: Any, prompt: Any, path: str, model: ServedModel) -> list[TokenChoice]:
    """The choices of one answer, checked."""
    if type(answer) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(answer)}", code="invalid_type")
    fields = Fields(answer, path)  # the rest of an answer is passed over
    given = fields.take("choices", {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES})
    if type(given) is not list or not given or not all(type(each) is dict for each in given):
        raise bad_field(f"{path}.choices", "must be an array of choices that is not empty", code="invalid_type")
    if len(given) > MAX_CHOICES:
        raise bad_field(f"{path}.choices", f"must have at most {MAX_CHOICES} choices, got {len(given)}")
    if fields.string("output_mode", "tokens", choices=("tokens",)) != "tokens":
        raise bad_field(f"{path}.output_mode", "must be tokens")
    own = fields.take("prompt_token_ids", _IDS)
    tail = prompt if prompt is not None else own if own is not None else []
    if type(tail) is not list:
        raise bad_field("prompt_token_ids", "must be an array of token ids", code="invalid_type")
    check_token_ids(tail[-TAIL_TOKENS:], "prompt_token_ids", model.vocab_size)
    return [
        _choice(each, tuple(tail[-TAIL_TOKENS:]), f"{path}.choices[{index}]", model) for index, each in enumerate(given)
    ]


def _choice(given: dict[str, Any], tail: tuple[int, ...], path: str, model: ServedModel) -> TokenChoice:
    fields = Fields(given, path)
    ids = fields.array("token_ids", max_items=INT32_MAX, items=token_id(model.vocab_size)) or []
    check_token_ids(ids, f"{path}.token_ids", model.vocab_size)
    if fields.take("logprobs", {"enum": []}) is not None:
        problem = "cannot be told by the names of their tokens here: ask the route of the chat or the completion"
        raise bad_field(f"{path}.logprobs", problem, code="unsupported_parameter")
    finish, stop = fields.take("finish_reason", {"enum": list(_FINISHED)}), fields.take("stop_reason", _STOP)
    if finish not in (*_FINISHED, None) or type(stop) not in (str, int, type(None)):
        raise bad_field(f"{path}.finish_reason", "is not what /inference/v1/generate answers")
    return TokenChoice(ids=ids, finish_reason=finish, stop_reason=stop, tail=tail)


def chat_choices(derender: Derender, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The choices of the chat."""
    found = []
    details = derender.parsed.details if derender.parsed is not None else None
    for index, (choice, text) in enumerate(zip(derender.choices, texts, strict=True)):
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        finish = choice.finish_reason
        if details is not None and details.parsing is not None:
            parser = OutputParser(details.parsing, f"{derender.request_id}/{index}")
            message = parser.message(text)
            finish = "tool_calls" if parser.calls_tools and finish == "stop" else finish
        found.append({"index": index, "message": {**MESSAGE, **message}, **_end(choice), "finish_reason": finish})
    return found


def completion_choices(derender: Derender, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The choices of the completion, prompt by prompt."""
    choices = zip(derender.choices, texts, strict=True)
    return [{"index": index, "text": text, **_end(choice)} for index, (choice, text) in enumerate(choices)]


def _end(choice: TokenChoice) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
