"""What ``docs/compatibility/fields.md`` says of each field: "same", "different" and how, or "absent" and why.

Which fields are absent the parsers say: they are refused, or taken with values alone that ask for nothing. Of the
others ``HOW`` says in what they differ from what vLLM 0.33 does, or the API that they are of. Tests compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from pagebus.web.http.limits import INT32_MAX, INT64_MAX
from tests.web.compatibility.words import WHY

SAME, DIFFERENT, ABSENT, OURS = "same", "different", "absent", "ours"
COMPLETE = {"early_stopping", "embed_dtype", "encoding_format", "endianness", "reasoning_effort", "truncation_side"}
"""Fields of a few values each, all of which are taken."""
_NOTHING = "taken, and changes nothing"
_TEXTS = "texts only: no images, no audio"
_IDS = "at most 128 of letters, digits, `-`, `_`, `.` and `:`"
_SCHEMA = (
    "a schema has at most 128 KiB and is 64 deep; what it cannot hold: [structured output](../structured-output.md)"
)
_STOPS = "at most 16 of at most 256 bytes"
HOW: Mapping[str, str] = {
    "bad_words": "at most 128 of at most 1,024 bytes",
    "cache_control": f"{_NOTHING}: every prefix is cached",
    "cache_salt": "at most 256 characters",
    "chat_template": "at most 65,536 characters, and 0.25 s of computing",
    "chat_template_kwargs": "at most 16 and 65,536 bytes, none of which steers the rendering itself",
    "context_management": "only `clear_thinking_20251015`: thoughts are not shown to the model again anyway",
    "documents": "at most 128 objects of strings",
    "generate_response": "whole, without log probabilities",
    "generate_responses": "whole, without log probabilities",
    "guided_choice": "at most 4,096 texts",
    "guided_grammar": "at most 128 KiB",
    "guided_json": _SCHEMA,
    "guided_regex": "at most 128 KiB",
    "include": "log probabilities; answers here have nothing of the others",
    "length_penalty": "-10 to 10",
    "logit_bias": "of at most 300 tokens",
    "messages": _TEXTS,
    "metadata": f"{_NOTHING}: nothing is stored",
    "n": "at most 64",
    "parse_context": _NOTHING,
    "prediction": "of a longer one the first 8,192 tokens count; [speculation](../speculation.md#predictions)",
    "priority": "32 bits",
    "prompt_cache_key": f"{_NOTHING}: every prefix is cached",
    "prompt_cache_retention": f"{_NOTHING}: what is cached stays as long as there is room",
    "prompt_logprobs": "at most 256 of each token",
    "reasoning": "`effort`; `summary` only `auto`: there is none",
    "reasoning_ended": _NOTHING,
    "output_config": _SCHEMA,
    "reasoning_parser_kwargs": _NOTHING,
    "repetition_detection": "patterns have at most 4,096 tokens",
    "repetition_penalty": "0.001 to 1000",
    "request_id": _IDS,
    "request_ids": "those of one's own key alone",
    "response_format": _SCHEMA,
    "return_token_ids": "the prompt's ids are told either way",
    "safety_identifier": _NOTHING,
    "sampling_params": "those that a completion has",
    "service_tier": "`auto` and `default`: there is one",
    "skip_special_tokens": "off beside a reasoning parser: the marks may be such tokens",
    "stop": _STOPS,
    "stop_sequences": _STOPS,
    "stop_token_ids": "at most 128",
    "store": "only `false`: chats are not kept, [responses](#other-routes) are",
    "stream_options": "`include_obfuscation` only `false`",
    "structured_outputs": f"no `whitespace_pattern`, no `disable_additional_properties`; {_SCHEMA}",
    "system": _TEXTS,
    "text": f"`verbosity` only `medium`; {_SCHEMA}",
    "thinking": "`budget_tokens` is a chat's `thinking_token_budget`; `display` `omitted` leaves the block out",
    "thinking_token_budget": "needs a model whose marks of reasoning are tokens; it is a "
    "[grammar](../structured-output.md#reasoning)",
    "token_offsets": _NOTHING,
    "tool_choice": "no `allowed_tools`",
    "tools": "functions that clients call, at most 128",
    "use_beam_search": "at most `--max-beam-width` beams; what samples or changes probabilities is a 400 beside it",
    "user": _NOTHING,
}
"""By the field's name, on all routes but those of ``HOW_AT``."""
HOW_AT: Mapping[tuple[str, str], str] = {
    ("/v1/batches", "metadata"): "",
    ("/v1/chat/completions", "return_token_ids"): "",
    ("/v1/completions", "return_token_ids"): "",
    ("/v1/embeddings", "input"): "at most 2,048 texts, lists of tokens, or conversations",
    ("/v1/embeddings", "messages"): f"{_TEXTS}; at most 2,048 conversations",
    ("/classify", "input"): "at most 2,048 texts, lists of tokens, or conversations",
    ("/classify", "messages"): f"{_TEXTS}; at most 2,048 conversations",
    ("/pooling", "input"): "at most 2,048 texts, lists of tokens, or conversations",
    ("/pooling", "messages"): f"{_TEXTS}; at most 2,048 conversations",
    ("/rerank", "documents"): 'texts, `{"text": ...}` or vLLM\'s text parts; at most 4,096 with the query',
    ("/score", "documents"): "",
    ("/score", "instruction"): "for the template of `--chat-template`",
    ("/rerank", "instruction"): "for the template of `--chat-template`",
    ("/v1/messages", "metadata"): f"`user_id`, which is {_NOTHING}",
    ("/v1/messages", "tool_choice"): "",
    ("/v1/messages/count_tokens", "tool_choice"): f"{_NOTHING}: it is not in the prompt",
    ("/v1/messages/count_tokens", "output_config"): "`effort`; nothing else of it is in the prompt",
    ("/v1/responses", "input"): "texts, calls of functions and their results",
    ("/v1/responses", "metadata"): "",
    ("/v1/responses", "store"): "",
    ("/v1/responses", "user"): "",
    ("/tokenize", "tool_choice"): f"{_NOTHING}: it is not in the prompt",
    ("/pause", "clear_cache"): "empties the host tier, too",
    ("/sleep", "level"): "1 and 2 are the same: all memory is given back",
    ("/server_info", "config_format"): "of Pagebus's settings",
}
"""By route; empty: it is the same there."""
BOUNDS = {"dimensions": "up to the model's hidden size"}
"""Where those of a number are the model's."""


def word_of(name: str, schemas: Mapping[str, Any], listed: Iterable[str], path: str) -> tuple[str, str]:
    """The word for a field of a route, and what is to be said beside it. No word: the route has no such field."""
    schema = schemas.get(name)
    if schema is None:
        return (ABSENT, WHY.get(name, "")) if name in listed else ("", "")
    neutral = [value for value in schema.get("enum", ()) if value is not None]
    if neutral and name not in COMPLETE | {"model"} and schema.get("type") is None:
        return ABSENT, f"only {_either([orjson.dumps(value).decode() for value in neutral])}: {WHY[name]}"
    how = HOW_AT.get((path, name), HOW.get(name, ""))
    return (DIFFERENT, how) if how else (SAME, BOUNDS.get(name, _range(schema)))


def _either(values: list[str]) -> str:
    shown = [f"`{value}`" for value in values]
    return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _range(schema: Mapping[str, Any]) -> str:
    """The bounds of a number, if it has some."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    if low is None:
        return ""
    above = "above " if "exclusiveMinimum" in schema else ""
    high = schema.get("maximum", INT64_MAX)
    if high >= INT32_MAX:
        return f"{above or 'from '}{low:g}" if low > -INT32_MAX else "64 bits"
    return f"{above}{low:g} to {high:g}"
