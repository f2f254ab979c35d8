"""Tools combined with a structured output: either calls in the model's own format or what ``response_format`` asks for.

The choice is expressed as a structural tag. It is available for families with a single call format. For others, as in
vLLM, the output is what ``response_format`` asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from msgspec import structs

from pagebus.bus.messages import StructuredOutput
from pagebus.web.calls.parsing.formats import deepseek_mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What stands around calls, and around the arguments of each; in ``begins`` NAME is the tool's name. ``numbered``:
    behind ``begins`` stand a number and ``argues``. ``single``: there can be one call only."""

    opens: str = ""
    begins: str
    argues: str = ""
    ends: str
    separator: str = ""
    closes: str = ""
    numbered: bool = False
    single: bool = False


_JSON = '{"name": "NAME", "arguments": '
HERMES = Envelope(begins="<tool_call>\n" + _JSON, ends="}\n</tool_call>", separator="\n")
LLAMA = Envelope(begins='{"name": "NAME", "parameters": ', ends="}", separator="; ")
_BEGIN, _SEP, _END = map(deepseek_mark, ("tool call begin", "tool sep", "tool call end"))
DEEPSEEK = Envelope(
    opens=deepseek_mark("tool calls begin"),
    begins=f"{_BEGIN}NAME{_SEP}",
    ends=_END,
    closes=deepseek_mark("tool calls end"),
)
ENVELOPES = {
    "deepseek_v3": replace(
        DEEPSEEK,
        begins=f"{_BEGIN}function{_SEP}NAME\n```json\n",
        ends=f"\n```{_END}",
        separator="\n",
    ),
    "deepseek_v31": DEEPSEEK,
    "granite4": HERMES,
    "hermes": HERMES,
    "internlm": Envelope(
        begins='<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', ends="}<|action_end|>", single=True
    ),
    "jamba": Envelope(opens="<tool_calls>[", begins=_JSON, ends="}", separator=", ", closes="]</tool_calls>"),
    "kimi_k2": Envelope(
        opens="<|tool_calls_section_begin|>",
        begins="<|tool_call_begin|>functions.NAME:",
        argues="<|tool_call_argument_begin|>",
        ends="<|tool_call_end|>",
        closes="<|tool_calls_section_end|>",
        numbered=True,
    ),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "phi4_mini_json": Envelope(opens="functools[", begins=_JSON, ends="}", separator=", ", closes="]"),
    "qwen3_json": HERMES,
}


def calls_or(
    wanted: StructuredOutput, schemas: Mapping[str, Any], parser: str, *, parallel: bool
) -> StructuredOutput:  # fmt: skip
    """``wanted``, or calls as ``parser`` reads them. ``schemas``: of each tool's arguments."""
    envelope, form = ENVELOPES.get(parser), _as_format(wanted)
    if envelope is None or form is None:
        return wanted
    calls = _calls(envelope, schemas, single=envelope.single or not parallel)
    tag = {"format": {"type": "or", "elements": [calls, form]}}
    return structs.replace(wanted, kind="structural_tag", text=orjson.dumps(tag).decode())


def _calls(envelope: Envelope, schemas: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    tags = [_call(envelope, name, schema) for name, schema in schemas.items()]
    some = {
        "type": "tags_with_separator", "tags": tags, "separator": envelope.separator,
        "at_least_one": True, "stop_after_first": single,
    }  # fmt: skip
    return _sequence([_const(envelope.opens), some, _const(envelope.closes)])


def _call(envelope: Envelope, name: str, schema: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    if envelope.numbered:
        content = _sequence([{"type": "regex", "pattern": "[0-9]{1,4}"}, _const(envelope.argues), content])
    return {
        "type": "tag", "begin": envelope.begins.replace("NAME", name), "content": content, "end": envelope.ends,
    }  # fmt: skip


def _as_format(wanted: StructuredOutput) -> dict[str, Any] | None:
    """What is wanted as a part of a structural tag; None if it has no such form."""
    if wanted.kind == "json":
        return {"type": "json_schema", "json_schema": json.loads(wanted.text)}
    if wanted.kind == "regex":
        return {"type": "regex", "pattern": wanted.text}
    if wanted.kind == "choice":
        return {"type": "or", "elements": [_const(each) for each in json.loads(wanted.text)]}
    if wanted.kind == "grammar":
        return {"type": "grammar", "grammar": wanted.text}
    form = json.loads(wanted.text).get("format")
    return form if isinstance(form, dict) else None


def _sequence(elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [each for each in elements if each != _const("")]}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
