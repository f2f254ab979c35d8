"""Reads ``tools`` and ``tool_choice``: what the template receives, and how the output is constrained and parsed.

With ``auto`` the model decides, and a parser knows its format (``--enable-auto-tool-choice``, ``--tool-call-parser``).
A forced call (``required`` or a named tool) is a structured output, which any model can write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from msgspec import structs

from pagebus.bus.messages import SamplingParams, StructuredOutput
from pagebus.web.calls.parsing.output import Parsing
from pagebus.web.calls.parsing.values import Types, types_of
from pagebus.web.http.errors import bad_field, unsupported_type
from pagebus.web.http.fields import ONLY_NULL, Fields, Schema
from pagebus.web.http.limits import INT32_MAX, MAX_SCHEMA_BYTES, MAX_TOOL_CALLS, MAX_TOOLS
from pagebus.web.requests.chat_messages import pass_over_cache_marks
from pagebus.web.requests.native_calls import calls_or
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.requests.structured import check_depth, constrain

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")
_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": ONLY_NULL,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": ONLY_NULL,
        },
    ]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Parsed tools. ``told``: those that the template gets. ``parsing``: how calls are parsed, None if there can be
    none."""

    told: tuple[dict[str, Any], ...] = ()
    parsing: Parsing | None = None


def read_tools(fields: Fields, sampling: SamplingParams, model: ServedModel) -> tuple[SamplingParams, Tools]:
    """Take the fields about tools; the sampling parameters with what calls need."""
    given = fields.array("tools", max_items=MAX_TOOLS) or []
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(given))
    choice, named = _read_choice(fields, tools)
    parallel = fields.boolean("parallel_tool_calls", True)
    if not tools or choice == "none":
        return sampling, Tools()
    names = tuple(tool["function"]["name"] for tool in tools)
    parsing = Parsing(tools=choice, names=names, named=named or "", most_calls=None if parallel else 1)
    if choice == "auto":
        if not model.auto_tools:
            flags = "--enable-auto-tool-choice and --tool-call-parser"
            raise bad_field("tool_choice", f'"auto" needs a server that was started with {flags}')
        sampling = structs.replace(sampling, skip_special_tokens=False)  # calls may stand between such
        if (asked := sampling.structured_output) is not None:
            schemas = {tool["function"]["name"]: _arguments(tools, index) for index, tool in enumerate(tools)}
            either = calls_or(asked, schemas, model.tool_parser, parallel=parallel)
            sampling = structs.replace(sampling, structured_output=either)
        return sampling, Tools(told=tools, parsing=replace(parsing, tools=model.tool_parser, types=_types(tools)))
    wanted = _named_call(tools, named) if named else _required_calls(tools, parallel=parallel)
    return constrain(_freed(sampling, named), wanted, "tool_choice"), Tools(told=tools, parsing=parsing)


def _freed(sampling: SamplingParams, named: str | None) -> SamplingParams:
    """Calls that have to be stand above what else an output has to be. vLLM takes a ``response_format`` beside any such
    choice, but the fields of its own not beside a tool's name."""
    asked = sampling.structured_output
    if asked is None:
        return sampling
    if named and not asked.field.startswith("response_format"):
        raise bad_field(asked.field, "cannot be combined with a tool_choice that names a tool")
    return structs.replace(sampling, structured_output=None)


def _read_tool(tool: object, path: str) -> dict[str, Any]:
    """A tool as templates know it, without what they do not."""
    if type(tool) is not dict:
        raise bad_field(path, "must be an object", code="invalid_type")
    fields = Fields(tool, path)
    kind = fields.string("type", None, choices=("function",))
    if kind != "function":
        raise bad_field(f"{path}.type", "is required" if kind is None else "must be 'function'")
    given = fields.object("function")
    if given is None:
        raise bad_field(f"{path}.function", "is required")
    pass_over_cache_marks(fields)
    fields.finish({})
    inner = Fields(given, f"{path}.function")
    function: dict[str, Any] = {"name": inner.string("name", None)}
    if function["name"] is None:
        raise bad_field(f"{path}.function.name", "is required")
    if not NAME.fullmatch(function["name"]):
        raise bad_field(f"{path}.function.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    for name, value in (
        ("description", inner.string("description", None, max_chars=INT32_MAX)),
        ("parameters", inner.object("parameters")),
    ):
        if value is not None:
            function[name] = value
    inner.boolean("strict", False)
    pass_over_cache_marks(inner)
    inner.finish({})
    check_depth(function.get("parameters", {}), f"{path}.function.parameters")
    if len(orjson.dumps(function)) > MAX_SCHEMA_BYTES:
        raise bad_field(f"{path}.function", f"must have at most {MAX_SCHEMA_BYTES} bytes")
    return {"type": "function", "function": function}


def _read_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, str | None]:
    """One of :data:`CHOICES` or ``named``, and the name."""
    choice = fields.take("tool_choice", _CHOICE)
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise bad_field("tool_choice", f"must be {', '.join(CHOICES)} or an object, got {choice[:40]!r}")
        if choice == "required" and not tools:
            raise bad_field("tool_choice", "needs tools")
        return choice, None
    if type(choice) is not dict:
        raise bad_field("tool_choice", "must be a string or an object", code="invalid_type")
    inner = Fields(choice, "tool_choice")
    if inner.string("type", None) != "function":
        raise unsupported_type("tool_choice", choice)
    function = Fields(inner.object("function") or {}, "tool_choice.function")
    name = function.string("name", None)
    function.finish({})
    inner.finish({})
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_field("tool_choice.function.name", "must be the name of one of the tools")
    return "named", name


def _types(tools: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Types]]:
    """What the arguments of each tool may be."""
    types = {}
    for tool in tools:
        parameters, followed = _parameters(tool), dict[str, Types]()
        properties = parameters.get("properties")
        schemas = properties.items() if isinstance(properties, dict) else ()
        types[tool["function"]["name"]] = {name: types_of(schema, parameters, followed) for name, schema in schemas}
    return types


def _named_call(tools: tuple[dict[str, Any], ...], name: str) -> StructuredOutput:
    """Constrain the output to the arguments of one tool."""
    index = [tool["function"]["name"] for tool in tools].index(name)
    text = orjson.dumps(_arguments(tools, index)).decode()
    return StructuredOutput(kind="json", text=text, field=f"tools[{index}].function.parameters")


def _required_calls(tools: tuple[dict[str, Any], ...], *, parallel: bool) -> StructuredOutput:
    """Constrain the output to an array of calls, at least one. Each tool's schema has an id, so that its references are
    found in it and not in the whole, nor in another tool's; drafts that see nothing beside a reference do not count
    within another schema."""
    calls = []
    schemas = [_arguments(tools, index) for index in range(len(tools))]
    given = [schema.get("$id") for schema in schemas]
    for index, tool in enumerate(tools):
        parameters = {**schemas[index]}
        if given[index] is None or given.count(given[index]) > 1:
            parameters["$id"] = f"tools:{index}"
        parameters.pop("$schema", None)
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    most = MAX_TOOL_CALLS if parallel else 1
    text = orjson.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}})
    return StructuredOutput(kind="json", text=text.decode(), field="tools")


def _arguments(tools: tuple[dict[str, Any], ...], index: int) -> dict[str, Any]:
    """What the arguments of a tool have to be: an object."""
    schema = _parameters(tools[index])
    kind = schema["type"]
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_field(f"tools[{index}].function.parameters.type", "must be 'object': arguments are one")
    return {**schema, "type": "object"}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object unless it says otherwise."""
    return {"type": "object", **tool["function"].get("parameters", {})}
