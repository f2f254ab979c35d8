"""The tables of ``docs/compatibility``: fields of OpenAI's and vLLM's API, flags of vLLM, and what becomes of each.

    python -m tests.web.compatibility

writes them anew. What is served is what the parsers say (as in ``/openapi.json``); which fields there are comes from
the types of OpenAI's client, and from vLLM's protocol.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).parent))

import orjson
from compatibility_routes import BODIES, FILE, QUERIES, Body, served_query, words
from compatibility_words import ABSENT, DIFFERENT, WHY
from fake_backend import MODEL
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from actors.settings.declaring import flag_of
from actors.settings.vllm_flags import ALIASES, ANY, REFUSED, TAKEN
from actors.settings.vllm_objects import OBJECTS
from tests.vllm_names import fields_of as vllm_fields
from tests.vllm_names import stored
from web.app import ROUTES as ALL_ROUTES
from web.body_schema import body_schema
from web.limits import INT32_MAX, INT64_MAX
from web.routes.generation import ROUTES

FOLDER = Path(__file__).parents[2] / "docs" / "compatibility"
BEGIN, END = "<!-- fields -->", "<!-- end of fields -->"
BEGIN_ROUTES, END_ROUTES = "<!-- fields of other routes -->", "<!-- end of fields of other routes -->"
BEGIN_FLAGS, END_FLAGS = "<!-- flags -->", "<!-- end of flags -->"
BEGIN_LIST, END_LIST = "<!-- routes -->", "<!-- end of routes -->"
CHAT, COMPLETION = "POST /v1/chat/completions", "POST /v1/completions"
SAME_FLAGS = words(
    "allowed_origins api_key attention_backend block_size calculate_kv_scales chat_template "
    "disable_access_log_for_endpoints dtype enable_auto_tool_choice enable_log_outputs enable_log_requests "
    "enable_prefix_caching enable_tokenizer_info_endpoint enforce_eager generation_config gpu_memory_utilization host "
    "kv_cache_dtype kv_cache_memory_bytes load_format max_cudagraph_capture_size max_log_len max_logprobs "
    "max_model_len max_num_batched_tokens max_num_seqs num_gpu_blocks_override otlp_traces_endpoint port "
    "reasoning_parser revision scheduling_policy seed served_model_name swap_space tokenizer tool_call_parser "
    "trust_request_chat_template enable_force_include_usage enable_per_request_metrics log_level max_num_queued_tokens "
    "max_num_scheduled_tokens "
    "root_path skip_tokenizer_init sse_keep_alive_interval stream_interval tokens_only uds"
)
"""Settings that vLLM has too."""
OLD = ["guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"]
OWN = ["early_stopping", "timeout"]
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


def describe(name: str, schemas: Mapping[str, Any], others: Iterable[str]) -> str:
    """What becomes of one field at one endpoint."""
    if name not in others and name not in schemas:
        return ""
    schema = schemas.get(name)
    if schema is None:
        return "400"
    values = [value for value in schema.get("enum", ()) if value is not None]
    if values and name != "model" and schema.get("type") is None:
        shown = [f"`{_json(value)}`" for value in values]
        return f"only {' or '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}, else 400"
    if "minimum" in schema or "exclusiveMinimum" in schema:
        return f"served, {_range(schema)}"
    return "served"


def why(name: str, *here: str) -> str:
    """Why the field is not served, where it is not."""
    return WHY.get(name, "") if any(each.endswith("400") and not each.endswith("86400") for each in here) else ""


def _range(schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    above = "above " if "exclusiveMinimum" in schema else ""
    high = schema.get("maximum", INT64_MAX)
    if high >= INT32_MAX:
        return f"{above or 'from '}{low:g}" if low > -INT32_MAX else "any integer"
    return f"{above}{low:g} to {high:g}"


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def table() -> str:
    """All fields, by name."""
    chat, completion = known_here()
    in_chat = OPENAI_CHAT | vllm_fields(CHAT) | set(OLD) | set(OWN)
    in_completion = OPENAI_COMPLETION | vllm_fields(COMPLETION) | set(OLD) | set(OWN)
    lines = ["| field | of | chat | completions | why not |", "| --- | --- | --- | --- | --- |"]
    for name in sorted(in_chat | in_completion | set(chat) | set(completion)):
        openai = name in OPENAI_CHAT | OPENAI_COMPLETION
        origin = "OpenAI" if openai else "Pagebus" if name in OWN else "vLLM"
        here = describe(name, chat, in_chat), describe(name, completion, in_completion)
        lines.append(f"| `{name}` | {origin} | {here[0]} | {here[1]} | {why(name, *here)} |")
    return "\n".join(lines)


def body_table(body: Body) -> str:
    """All fields of a route's body, by name."""
    schemas = body.known()
    listed = body.api | body.vllm | body.own | set(schemas)
    lines = [f"`POST {body.path}`", "", "| field | of | here | why not |", "| --- | --- | --- | --- |"]
    for name in sorted(listed):
        origin = body.inventor if name in body.api else "vLLM" if name in body.vllm else "Pagebus"
        here = describe(name, schemas, listed)
        lines.append(f"| `{name}` | {origin} | {here} | {why(name, here)} |")
    return "\n".join(lines)


def other_tables() -> str:
    """The routes besides chats and completions: bodies, then what has none."""
    lines = ["| route | served | 400 |", "| --- | --- | --- |"]
    lines.append(f"| `POST /v1/files` (form) | {_names(FILE)} | |")
    for query in QUERIES:
        served = served_query(query)
        refused = query.api - served
        lines.append(f"| `GET {query.path}` | {_names(served)} | {_names(refused)} |")
    lines.append("| `GET /v1/models`, `GET /v1/models/{id}` | | |")
    return "\n\n".join([*map(body_table, BODIES), "\n".join(lines)])


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
