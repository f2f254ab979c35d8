"""The tables of ``docs/compatibility``: fields of OpenAI's and vLLM's API, flags of vLLM, and what becomes of each.

    python -m tests.web.compatibility.tables

writes them anew. What is served is what the parsers say (as in ``/openapi.json``); which fields there are comes from
the types of OpenAI's client, and from vLLM's protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from pagebus.actors.settings.declaring import flag_of
from pagebus.actors.settings.vllm_flags import ALIASES, ANY, REFUSED, TAKEN
from pagebus.actors.settings.vllm_objects import OBJECTS, SHORT
from pagebus.web.app import ROUTES as ALL_ROUTES
from pagebus.web.routes.body_schema import body_schema
from pagebus.web.routes.generate.generation import ROUTES
from tests.vllm_names import fields_of as vllm_fields
from tests.vllm_names import stored
from tests.web.compatibility.fields import OURS, SAME, word_of
from tests.web.compatibility.routes import BODIES, FILE, QUERIES, Body, served_query, words
from tests.web.compatibility.words import ABSENT, DIFFERENT
from tests.web.fake_backend import MODEL

FOLDER = Path(__file__).parents[3] / "docs" / "compatibility"
BEGIN, END = "<!-- fields -->", "<!-- end of fields -->"
BEGIN_ROUTES, END_ROUTES = "<!-- fields of other routes -->", "<!-- end of fields of other routes -->"
BEGIN_FLAGS, END_FLAGS = "<!-- flags -->", "<!-- end of flags -->"
BEGIN_LIST, END_LIST = "<!-- routes -->", "<!-- end of routes -->"
CHAT, COMPLETION = "POST /v1/chat/completions", "POST /v1/completions"
SAME_FLAGS = words(
    "allowed_origins api_key attention_backend block_size calculate_kv_scales chat_template "
    "disable_access_log_for_endpoints disable_custom_all_reduce disable_hybrid_kv_cache_manager dtype "
    "enable_auto_tool_choice enable_expert_parallel enable_force_include_usage enable_log_outputs enable_log_requests "
    "enable_lora enable_per_request_metrics "
    "enable_prefix_caching enable_tokenizer_info_endpoint enforce_eager generation_config gpu_memory_utilization host "
    "kv_cache_dtype kv_cache_memory_bytes load_format log_level lora_modules lora_target_modules max_cpu_loras "
    "max_cudagraph_capture_size max_log_len max_logprobs max_lora_rank max_loras max_model_len max_num_batched_tokens "
    "max_num_queued_tokens max_num_scheduled_tokens max_num_seqs num_gpu_blocks_override otlp_traces_endpoint port "
    "reasoning_parser revision root_path scheduling_policy seed served_model_name skip_tokenizer_init "
    "sse_keep_alive_interval stream_interval swap_space tokenizer tokens_only tool_call_parser "
    "trust_request_chat_template uds"
)
"""Settings that vLLM has too."""
OLD = ["guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"]
OWN = ["early_stopping", "num_speculative_tokens", "timeout"]
"""Neither OpenAI's nor vLLM's (today)."""


def fields_of(*types: Any) -> set[str]:
    """The names of all parameters of OpenAI's client."""
    return {name for each in types for name in get_type_hints(each)}


OPENAI_CHAT = fields_of(
    chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming
)  # fmt: skip
OPENAI_COMPLETION = fields_of(
    completion_params.CompletionCreateParamsNonStreaming, completion_params.CompletionCreateParamsStreaming
)


def known_here() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Schemas of the fields that the parsers of chats and completions take."""
    schemas = {}
    for route in ROUTES:
        assert route.about.parse is not None
        schemas[route.path] = body_schema(route.about.parse, list(route.about.examples.values()), MODEL)["properties"]
    return schemas["/v1/chat/completions"], schemas["/v1/completions"]


def table() -> str:
    """All fields, by name."""
    chat, completion = known_here()
    in_chat = OPENAI_CHAT | vllm_fields(CHAT) | set(OLD) | set(OWN)
    in_completion = OPENAI_COMPLETION | vllm_fields(COMPLETION) | set(OLD) | set(OWN)
    lines = ["| field | of | chat | completions | bounds, how, or why not |", "| --- | --- | --- | --- | --- |"]
    for name in sorted(in_chat | in_completion | set(chat) | set(completion)):
        openai = name in OPENAI_CHAT | OPENAI_COMPLETION
        origin = "OpenAI" if openai else "Pagebus" if name in OWN else "older vLLM" if name in OLD else "vLLM"
        here = word_of(name, chat, in_chat, "/v1/chat/completions")
        there = word_of(name, completion, in_completion, "/v1/completions")
        words = [OURS if origin == "Pagebus" and word == SAME else word for word, _ in (here, there)]
        lines.append(f"| `{name}` | {origin} | {words[0]} | {words[1]} | {_both(here[1], there[1])} |")
    return "\n".join(lines)


def _both(here: str, there: str) -> str:
    """What is said of a field of chats and of completions."""
    if here and there and here != there:
        return f"{here}; completions: {there}"
    return here or there


def body_table(body: Body) -> str:
    """All fields of a route's body, by name."""
    schemas = body.known()
    listed = body.api | body.vllm | body.own | set(schemas)
    paths = ", ".join(f"`POST {path}`" for path in (body.path, *body.also))
    lines = [paths, "", "| field | of | here | bounds, how, or why not |", "| --- | --- | --- | --- |"]
    for name in sorted(listed):
        origin = body.inventor if name in body.api else "vLLM" if name in body.vllm else "Pagebus"
        word, text = word_of(name, schemas, listed, body.path)
        lines.append(f"| `{name}` | {origin} | {OURS if origin == 'Pagebus' and word == SAME else word} | {text} |")
    return "\n".join(lines)


def queries_table() -> str:
    """The parameters of vLLM's routes that have no body."""
    ours = {f"{route.method} {route.path}": route for route in ALL_ROUTES}
    lines = ["| route | parameter | here | bounds, how, or why not |", "| --- | --- | --- | --- |"]
    for name, fields in stored()["routes"].items():
        schemas = ours[name].about.query if name in ours else {}
        if name.startswith("GET") or schemas:
            for field in fields if name in ours else ():
                complete = {field: {"type": "string", **schemas[field]}} if field in schemas else {}
                word, text = word_of(field, complete, fields, name.split(" ")[1])
                lines.append(f"| `{name}` | `{field}` | {word} | {text} |")
    return "\n".join(lines)


def other_tables() -> str:
    """The routes besides chats and completions: bodies, then what has none."""
    lines = ["| route | same | absent |", "| --- | --- | --- |"]
    lines.append(f"| `POST /v1/files` (form) | {_names(FILE)} | |")
    for query in QUERIES:
        served = served_query(query)
        refused = query.api - served
        lines.append(f"| `GET {query.path}` | {_names(served)} | {_names(refused)} |")
    lines.append("| `GET /v1/models`, `GET /v1/models/{id}` | | |")
    return "\n\n".join([*map(body_table, BODIES), "\n".join(lines), queries_table()])


def flags_table() -> str:
    """vLLM's flags: those that are settings here, then those that are not."""
    same = f"{_names([*map(flag_of, SAME_FLAGS), '--model', '--config'])} are settings by the same names.\n"
    lines = [same, "| flag | is here |", "| --- | --- |"]
    lines += [f"| `{name}` | `{flag_of(setting)}` |" for name, setting in ALIASES.items()]
    lines += ["", "| field of an object | what becomes of it |", "| --- | --- |"]
    for flag, parts in OBJECTS.items():
        for name, part in parts.items():
            taken = "taken" if part.taken == ANY else f"{_names(part.taken)}, else refused"
            lines.append(f"| `{flag}.{name}` | {f'`{flag_of(part.setting)}`' if part.setting else taken} |")
    lines += ["", "| flags | what becomes of them |", "| --- | --- |"]
    for flag in TAKEN + REFUSED:
        values = "taken" if flag.taken == ANY else f"{_names(flag.taken)}, else refused" if flag.taken else "refused"
        if all(OBJECTS.get(SHORT.get(name, name)) for name in flag.names.split()):
            values = "an object with the fields above; others are refused"
        words_and_flags = flag.text.split("`")  # every other piece is marked already
        words_and_flags[::2] = (re.sub("(--[a-z-]+)", r"`\1`", piece) for piece in words_and_flags[::2])
        names = ", ".join(f"`{name}`" for name in flag.names.split())
        lines.append(f"| {names} | {values}: {'`'.join(words_and_flags)} |")
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def routes_table() -> str:
    """All routes of vLLM: the same, different how, or absent why."""
    ours = {f"{route.method} {route.path}" for route in ALL_ROUTES}
    lines = ["| route | here | |", "| --- | --- | --- |"]
    for name in stored()["routes"]:
        here = "absent" if name not in ours else "different" if name in DIFFERENT else "same"
        lines.append(f"| `{name}` | {here} | {DIFFERENT.get(name) if here != 'absent' else ABSENT[name]} |")
    return "\n".join(lines).replace("| None |", "| |")


def pages() -> dict[Path, str]:
    """The pages with the tables as they should be."""
    parts = {
        "fields.md": [(BEGIN, END, table()), (BEGIN_ROUTES, END_ROUTES, other_tables())],
        "routes.md": [(BEGIN_LIST, END_LIST, routes_table())],
        "flags.md": [(BEGIN_FLAGS, END_FLAGS, flags_table())],
    }
    return {FOLDER / name: _with_tables((FOLDER / name).read_text(), tables) for name, tables in parts.items()}


def _with_tables(page: str, tables: list[tuple[str, str, str]]) -> str:
    for begin, end, made in tables:
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
