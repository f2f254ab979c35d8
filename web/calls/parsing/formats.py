"""Formats of tool calls by model family, under the names of vLLM's parsers (``--tool-call-parser``).

Each is a row of marks, and how one call within them is read:

- :mod:`pagebus.web.calls.parsing.json_call`: ``{"name": ..., "arguments": {...}}``, or arguments behind a header with
  the name
- :mod:`pagebus.web.calls.parsing.tagged_call`: ``<function=name><parameter=key>value</parameter></function>``
- :mod:`pagebus.web.calls.parsing.python_call`: ``name(key=value)``

Harmony (gpt-oss) is no row: :mod:`pagebus.web.calls.parsing.harmony`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The marks within a call whose arguments have tags. ``name`` stands in front of the name and ends with one of
    ``name_ends``. A key stands between ``key`` and ``key_ends``, its value behind ``value``, up to one of
    ``value_ends``. ``closes`` is a call's end; ``leaves`` are marks that end it (or a value) and are not part of it.
    ``trims``: whether a line break at either end of a value is none of it."""

    name: str = ""
    name_ends: str = ""
    key: str
    key_ends: str
    value: str = ""
    value_ends: str
    closes: str = ""
    leaves: tuple[str, ...]
    trims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """``opens``: marks in front of calls; ``starts``: marks that a call itself begins with, outside of these too. With
    neither, the text is calls from its beginning; or, with ``perhaps`` (a character), if it begins with that (behind
    ``lead``, if it is there) and the tool is one that there is. ``closes``: the mark behind calls. ``between``: marks
    around calls that say nothing. ``header``: what stands in front of arguments, with groups ``name`` and ``id``.
    """

    opens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    closes: str = ""
    perhaps: str = ""
    lead: str = ""
    between: tuple[str, ...] = ()
    header: re.Pattern[str] | None = None
    call: Literal["json", "tagged", "python"] = "json"
    tags: Tags | None = None

    @property
    def marked(self) -> bool:
        """Whether calls may stand anywhere in a text, because they have marks."""
        return bool(self.opens or self.starts)


def deepseek_mark(words: str) -> str:
    """A token of DeepSeek's, whose bars and blanks are characters of their own."""
    bar, blank = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{words.replace(' ', blank)}{bar}>"


_NAME = r"(?P<name>[\w.-]+)"
_BEGIN, _SEP, _END = map(deepseek_mark, ("tool call begin", "tool sep", "tool call end"))
_CALLS, _CALLS_END = map(deepseek_mark, ("tool calls begin", "tool calls end"))
_QWEN_XML = Tags(
    name="<function=",
    name_ends=">",
    key="<parameter=",
    key_ends=">",
    value_ends="</parameter>",
    closes="</function>",
    leaves=("<parameter=", "<function=", "</tool_call>"),
    trims=True,
)
_GLM = Tags(
    key="<arg_key>",
    key_ends="</arg_key>",
    value="<arg_value>",
    value_ends="</arg_value>",
    leaves=("</tool_call>",),
)
FORMATS = {
    "deepseek_v3": Format(
        opens=(_CALLS,),
        closes=_CALLS_END,
        between=(_END, "```"),
        header=re.compile(rf"{re.escape(_BEGIN)}\w*{re.escape(_SEP)}\s*{_NAME}\s*(```(json)?)?\s*"),
    ),
    "deepseek_v31": Format(
        opens=(_CALLS,),
        closes=_CALLS_END,
        between=(_END,),
        header=re.compile(rf"{re.escape(_BEGIN)}\s*{_NAME}\s*{re.escape(_SEP)}\s*"),
    ),
    "glm45": Format(opens=("<tool_call>",), closes="</tool_call>", call="tagged", tags=_GLM),
    "granite": Format(opens=("<|tool_call|>", "<tool_call>")),
    "granite-20b-fc": Format(opens=("<function_call>",), between=("<function_call>",)),
    "hermes": Format(opens=("<tool_call>",), closes="</tool_call>"),
    "internlm": Format(opens=("<|action_start|><|plugin|>",), closes="<|action_end|>"),
    "jamba": Format(opens=("<tool_calls>",), closes="</tool_calls>"),
    "kimi_k2": Format(
        opens=("<|tool_calls_section_begin|>",),
        closes="<|tool_calls_section_end|>",
        between=("<|tool_call_end|>",),
        header=re.compile(
            rf"<\|tool_call_begin\|>\s*(?P<id>(functions\.)?{_NAME}(:\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
        ),
    ),
    "llama3_json": Format(perhaps="{", lead="<|python_tag|>"),
    "llama4_pythonic": Format(perhaps="[", lead="<|python_start|>", closes="<|python_end|>", call="python"),
    "mistral": Format(
        opens=("[TOOL_CALLS]",),
        between=("[TOOL_CALLS]",),
        header=re.compile(rf"{_NAME}\s*(\[CALL_ID\]\w*)?\s*(\[ARGS\])?\s*"),
    ),
    "phi4_mini_json": Format(opens=("functools[",)),
    "pythonic": Format(perhaps="[", call="python"),
    "qwen3_coder": Format(
        opens=("<tool_call>",), starts=("<function=",), closes="</tool_call>", call="tagged", tags=_QWEN_XML
    ),
}
FORMATS |= {
    "glm47": FORMATS["glm45"],
    "granite4": FORMATS["hermes"],
    "llama4_json": FORMATS["llama3_json"],
    "qwen3_json": FORMATS["hermes"],
    "qwen3_xml": FORMATS["qwen3_coder"],
}
FORCED = Format()
"""An array of objects ``{"name": ..., "parameters": {...}}`` (``tool_choice`` required), or nothing but the arguments
of the one tool that was named; both by a grammar."""
HARMONY = "openai"
PARSERS = tuple(sorted((*FORMATS, HARMONY)))
