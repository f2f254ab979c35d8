"""Every family's format of calls and reasoning, and what holds for all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.model.reasoning import FORMATS as REASONING_FORMATS
from pagebus.actors.settings import Settings
from pagebus.web.calls.parsing.formats import FORMATS, HARMONY, PARSERS
from pagebus.web.calls.parsing.output import OutputParser, Parsing
from pagebus.web.calls.parsing.python_call import literal
from pagebus.web.calls.parsing.values import STRING, typed, types_of

NAMES = ("get_weather", "search")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
    },
    "$defs": {"place": {"type": "object"}},
}
TYPES = {"get_weather": {name: types_of(part, SCHEMA, {}) for name, part in SCHEMA["properties"].items()}}
CITY = {"city": 'Bad "Ems"\n<b>, 你', "days": 3}
C = json.dumps(CITY, ensure_ascii=False)
WEATHER, SEARCH = ("get_weather", CITY), ("search", {})
B, S, E = (f"<\uff5ctool{name}\uff5c>" for name in ("\u2581call\u2581begin", "\u2581sep", "\u2581call\u2581end"))
DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
QWEN_XML = (
    '<function=get_weather>\n<parameter=city>\nBad "Ems"\n<b>, 你\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>"
)
GLM = (
    '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bad "Ems"\n<b>, 你</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
PYTHON = r'get_weather(city="Bad \"Ems\"\n<b>, 你", days=3)'
ANALYSIS = "<|channel|>analysis<|message|>hm <b></b><|end|><|start|>assistant"


def named(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


TWO = f"[{named('get_weather', C)}, {named('search', '{}')}]"
CASES = [  # (parser, text, content, calls)
    ("hermes", f"Well.\n<tool_call>\n{named('get_weather', C)}\n</tool_call>", "Well.", [WEATHER]),
    ("qwen3_json", f"<tool_call>{named('get_weather', C)}</tool_call> ok", " ok", [WEATHER]),
    ("granite4", f"<tool_call>{named('get_weather', C)}</tool_call><tool_call>{named('search', '{}')}</tool_call>",
     None, [WEATHER, SEARCH]),
    ("granite", f"<|tool_call|>{TWO}", None, [WEATHER, SEARCH]),
    ("granite", f"So: <tool_call> {TWO}\nDone.", "So:Done.", [WEATHER, SEARCH]),
    ("granite-20b-fc", f"<function_call> {named('get_weather', C)}\n<function_call>{named('search', '{}')}",
     None, [WEATHER, SEARCH]),
    ("internlm", f"I look.<|action_start|><|plugin|>\n{named('get_weather', C, 'parameters')}<|action_end|>\n",
     "I look.", [WEATHER]),
    ("jamba", f"<tool_calls>{TWO}</tool_calls>", None, [WEATHER, SEARCH]),
    ("phi4_mini_json", f"functools{TWO}", None, [WEATHER, SEARCH]),
    ("phi4_mini_json", "functools are fun", "functools are fun", []),
    ("llama3_json", named("get_weather", C, "parameters"), None, [WEATHER]),
    ("llama4_json", f"<|python_tag|>{named('get_weather', C)}; {named('search', '{}')}", None, [WEATHER, SEARCH]),
    ("pythonic", f"[{PYTHON}, search()]", None, [WEATHER, SEARCH]),
    ("pythonic", "[get_weather(place={'a': [1, -2.5, True, null]}, x=(1,), y='it\\'s')]", None,
     [("get_weather", {"place": {"a": [1, -2.5, True, None]}, "x": [1], "y": "it's"})]),
    ("pythonic", "[1] is a note (see b=2)", "[1] is a note (see b=2)", []),
    ("pythonic", "[unheard(of=1)]", "[unheard(of=1)]", []),
    ("pythonic", "[search(a=1, b=f(2)), x]", "[search(a=1, b=f(2)), x]", []),
    ("pythonic", "[search(), get_weather(a=\"cut", 'get_weather(a="cut', [SEARCH]),
    ("llama4_pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>", None, [WEATHER]),
    ("mistral", f"[TOOL_CALLS]{TWO}", None, [WEATHER, SEARCH]),
    ("mistral", f"Well.[TOOL_CALLS]get_weather[ARGS]{C}[TOOL_CALLS]search[CALL_ID]a1[ARGS]{{}}", "Well.",
     [WEATHER, SEARCH]),
    ("deepseek_v3", f"So.{DEEPSEEK[0]}{B}function{S}get_weather\n```json\n{C}\n```{E}\n"
     f"{B}function{S}search\n```json\n{{}}\n```{E}{DEEPSEEK[1]}", "So.", [WEATHER, SEARCH]),
    ("deepseek_v31", f"{DEEPSEEK[0]}{B}get_weather{S}{C}{E}{B}search{S}{{}}{E}{DEEPSEEK[1]}",
     None, [WEATHER, SEARCH]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     f"{C}<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", None, [WEATHER, SEARCH]),
    ("qwen3_coder", f"So.\n<tool_call>\n{QWEN_XML}\n</tool_call>", "So.", [WEATHER]),
    ("qwen3_xml", f"{QWEN_XML}\n</tool_call>\n<tool_call>\n<function=search>\n</function>\n</tool_call>",
     None, [WEATHER, SEARCH]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=exact>True<parameter=where>{\"a\": 1}</function>"
     "</tool_call>", None, [("get_weather", {"exact": True, "where": {"a": 1}})]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>\n\n a\n\n</parameter><parameter=note>null"
     "</parameter><parameter=days>many</parameter></function></tool_call>", None,
     [("get_weather", {"city": "\n a\n", "note": None, "days": "many"})]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Os", None, [("get_weather", '{"city": "Os')]),
    ("qwen3_coder", "<function=a b>text", "<function=a b>text", []),
    ("glm45", f"{GLM}\n<tool_call>search\n</tool_call>", None, [WEATHER, SEARCH]),
    ("glm47", "Well. <tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", "Well.",
     [("get_weather", {"days": 3})]),
    ("glm45", "a <tool_call>?? b</tool_call>", "a<tool_call>?? b</tool_call>", []),
    ("openai", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{C}", None, [WEATHER]),
    ("openai", f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{C}<|call|>"
     "<|start|>assistant<|channel|>final<|message|>Done.", "Done.", [WEATHER]),
    ("openai", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     "to=browser.open<|message|>x<|call|><|channel|>final<|message|>Yes <b>.", "I look.Yes <b>.", []),
    ("openai", " no header <|", " no header <|", []),
]  # fmt: skip


def parsing_of(parser: str, **more: Any) -> Parsing:
    return Parsing(tools=parser, names=NAMES, types=TYPES, harmony=parser == HARMONY, **more)


def joined(parsing: Parsing, pieces: list[str]) -> dict[str, Any]:
    """The message that a client makes of the deltas of ``pieces``."""
    parser, message = OutputParser(parsing, "key"), {"content": "", "reasoning_content": "", "tool_calls": []}
    deltas = [delta for piece in pieces for delta in parser.deltas(piece, ended=False)]
    for delta in [*deltas, *parser.deltas("", ended=True)]:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": {**call["function"]}})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def whole(parsing: Parsing, text: str) -> dict[str, Any]:
    """The message of a whole text, in the form of :func:`joined`."""
    message = OutputParser(parsing, "key").message(text)
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": message.get("tool_calls", []),
    }


def arguments_of(call: dict[str, Any], wanted: Any) -> Any:
    """As text where that is what is wanted: of a call that was cut off."""
    return call["function"]["arguments"] if isinstance(wanted, str) else json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_calls_of_a_family(parser, text, content, calls):
    """What a whole text says, and the same character by character."""
    message = whole(parsing_of(parser), text)
    found = [
        (call["function"]["name"], arguments_of(call, wanted))
        for call, (_, wanted) in zip(message["tool_calls"], calls, strict=True)
    ]

    assert (message["content"] or None, found) == (content, calls)
    assert joined(parsing_of(parser), list(text)) == message


def test_every_parser_has_a_case():
    """Each name that the setting takes; that is each there is."""
    assert {parser for parser, *_ in CASES} == set(PARSERS)
    choices = {name: Settings.__dataclass_fields__[name].metadata["choices"] for name in (
        "tool_call_parser", "reasoning_parser",
    )}  # fmt: skip
    assert choices == {"tool_call_parser": PARSERS, "reasoning_parser": tuple(sorted(REASONING_FORMATS))}


def test_kimis_calls_keep_their_ids():
    """Its template wants them back as it wrote them."""
    text = next(text for parser, text, *_ in CASES if parser == "kimi_k2")
    assert [call["id"] for call in whole(parsing_of("kimi_k2"), text)["tool_calls"]] == [
        "functions.get_weather:0", "functions.search:1",
    ]  # fmt: skip


REASONED = [  # (parsers, text, reasoning, content, names of calls)
    ("deepseek_r1", "", "hm</think>Yes.", "hm", "Yes.", []),
    ("deepseek_v3", "", "<think>hm</think>\n\nYes.", "hm", "Yes.", []),
    ("granite", "", "Here's my thought process: hm\nHere is my response: Yes.", " hm\n", "Yes.", []),
    ("granite", "", "Here is all.", None, "Here is all.", []),
    ("mistral", "mistral", "[THINK]hm[/THINK]Yes.[TOOL_CALLS]search{}", "hm", "Yes.", ["search"]),
    ("mistral", "mistral", "Yes.", None, "Yes.", []),
    ("qwen3", "qwen3_coder", f"<think>hm\n</think>\n\n{QWEN_XML}", "hm\n", None, ["get_weather"]),
    ("qwen3", "qwen3_coder", f"hm<tool_call>{QWEN_XML}</tool_call>", "hm", None, ["get_weather"]),
    ("glm45", "glm45", f"\n<think>hm</think>\n{GLM}", "hm", None, ["get_weather"]),
    ("kimi_k2", "hermes", "hm <tool_call></think>Yes", "hm <tool_call>", "Yes", []),
    ("openai_gptoss", "openai", f"{ANALYSIS}<|channel|>commentary to=functions.search json<|message|>{{}}",
     "hm <b></b>", None, ["search"]),
    ("openai_gptoss", "", f"{ANALYSIS}<|channel|>final<|message|>Yes.", "hm <b></b>", "Yes.", []),
    ("", "openai", f"{ANALYSIS}<|channel|>final<|message|>Yes.", None, "Yes.", []),
    ("openai_gptoss", "required", f'{ANALYSIS}<|channel|>final<|message|>[{{"name": "search", "parameters": {{}}}}]',
     "hm <b></b>", None, ["search"]),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "tools", "text", "thought", "content", "calls"), REASONED)
def test_reasoning_of_a_family(reasoning, tools, text, thought, content, calls):
    """Reasoning, content and calls of one text, whole and character by character."""
    harmony = tools == HARMONY or reasoning == "openai_gptoss"
    parsing = Parsing(reasoning=reasoning, tools=tools, names=NAMES, types=TYPES, harmony=harmony)
    message = whole(parsing, text)

    assert (message["reasoning_content"] or None, message["content"] or None) == (thought, content)
    assert [call["function"]["name"] for call in message["tool_calls"]] == calls
    assert joined(parsing, list(text)) == message


FRAGMENTS = sorted(
    {part for form in FORMATS.values() for part in (*form.opens, *form.starts, *form.between, form.closes, form.lead)}
    | {"<think>", "</think>", "<parameter=city>", "</parameter>", "<parameter=days>", "</function>", "<arg_key>"}
    | {"</arg_key>", "<arg_value>", "</arg_value>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "[/THINK]"}
    | {"search", "get_weather", "functions.search:0", "[ARGS]", "city", "3", "\n", " ", "{", "}", "[", "]", "(", ")"}
    | {"=", ",", '"', "'", "\\", "<", C, named("search", "{}"), PYTHON, B, S, "text"}
    | {"<|tool_call_begin|>", "<|tool_call_argument_begin|>", "analysis", " to=functions.search"}
)
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.sampled_from([text for _, text, *_ in (*CASES, *(row[1:] for row in REASONED))]),
)
PARSINGS = st.builds(
    lambda tools, reasoning, most: Parsing(
        tools=tools, reasoning=reasoning, names=NAMES, types=TYPES, most_calls=most,
        harmony=tools == HARMONY or reasoning == "openai_gptoss",
    ),
    st.sampled_from(["", "required", *PARSERS]), st.sampled_from(["", *REASONING_FORMATS]), st.sampled_from([None, 1]),
)  # fmt: skip


@given(parsing=PARSINGS, text=TEXTS, data=st.data())
def test_however_a_text_is_cut(parsing, text, data):
    """Any split of a text into deltas says what the whole says; a stream that is resumed anywhere goes on with it."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    message = whole(parsing, text)

    assert joined(parsing, pieces) == message
    assert joined(parsing, list(text)) == message


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), parser=st.sampled_from(sorted(FORMATS)))
def test_nothing_is_lost(text, parser):
    """Without any call, all of a text is content, but for blanks in front of marks."""
    message = whole(parsing_of(parser), text)
    if message["tool_calls"] or (FORMATS[parser].closes and FORMATS[parser].closes in text):
        return

    assert "".join(message["content"].split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"integer"}, "5"),
        ("5", {"string"}, '"5"'),
        ("5", {"string", "integer"}, "5"),
        ("5.0", {"integer"}, "5"),
        ("5.5", {"integer", "number"}, "5.5"),
        ("1e999", {"number"}, '"1e999"'),
        ("TRUE", {"boolean"}, "true"),
        ("null", {"null", "string"}, "null"),
        ("null", {"string"}, '"null"'),
        ('{"a": [1, "ü"]}', {"object"}, '{"a": [1, "ü"]}'),
        ("[1e999]", {"array"}, '"[1e999]"'),
        ("[" * 5000, {"array"}, json.dumps("[" * 5000)),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
    ],
)
def test_values_by_their_types(text, types, expected):
    """The narrowest type that the text is of; a string where it is of none."""
    assert typed(text, frozenset(types)) == expected


def test_types_of_a_schema():
    """Through references, unions, enumerations; nothing said, or said in a circle, is a string."""
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert types_of({"enum": [1, None, "a"]}, {}, {}) == {"integer", "null", "string"}
    assert types_of({"anyOf": [{"type": "array"}, {"const": 1.5}]}, {}, {}) == {"array", "number"}
    assert TYPES["get_weather"]["where"] == {"object"}
    assert types_of(circle, circle, {}) == types_of({}, {}, {}) == types_of(True, {}, {}) == STRING


def test_escapes_that_python_does_not_know():
    """They stand for themselves, without a warning: expressions are full of them."""
    assert literal(r"'\d+\n'") == json.dumps("\\d+\n")


def test_a_schema_that_refers_to_itself_many_times():
    """Each reference is followed once: otherwise a short schema would keep its reader busy for years."""
    tree = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30 + [{"type": "integer"}]}}}
    assert types_of(tree, tree, {}) == {"integer", "string"}
