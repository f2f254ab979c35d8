"""Tools and reasoning at the HTTP endpoint: what reaches the bus, and what the model's text becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import load_vocabulary, make_matcher, write_grammar
from pagebus.bus.messages import StructuredOutput
from pagebus.web.calls.parsing.output import OutputParser
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.native_calls import ENVELOPES
from pagebus.web.requests.openai import parse_completion
from tests.actors.model.grammars.test_grammar import accepts
from tests.web.fake_backend import MODEL
from tests.web.requests.tool_cases import CLOCK, PARAMETERS, SERVED, WEATHER, chat, refused, user

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
VOCABULARY = load_vocabulary(FOLDER, ModelConfig.load(FOLDER))


def test_what_the_template_is_told():
    """Tools as they were given, calls with their arguments as objects, results, reasoning."""
    history = [
        user("Weather?"),
        {
            "role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    ]  # fmt: skip
    asked = chat(messages=history, tools=[WEATHER, CLOCK], documents=[{"title": "t", "text": "d"}])
    (message,) = asked.messages_for_bus(["id"], "ingress", 0.0)

    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}, "id": "1"}
    assert message.messages == (
        user("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    )
    assert message.tools == (WEATHER, CLOCK)
    assert message.documents == ({"title": "t", "text": "d"},)
    assert message.sampling.skip_special_tokens is False


@pytest.mark.parametrize("arguments", ['{"city": "Os', "Oslo", "[]", ""])
def test_arguments_that_were_cut_off_are_shown_as_none(arguments):
    """As in vLLM: the client sends them back with each turn, with what it says of them."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": "1", "content": "no JSON"}
    asked = chat(messages=[user("Weather?"), {"role": "assistant", "content": None, "tool_calls": [call]}, told])

    [shown] = asked.prompts[0].messages[1]["tool_calls"]
    assert shown["function"] == {"name": "weather", "arguments": {}}


def test_no_tools():
    """Without any, or without a choice, nothing is different; parallel calls are what there is anyway."""
    assert chat(tools=[], parallel_tool_calls=True) == chat()
    assert chat(tools=[WEATHER], tool_choice="none") == chat()


def test_calls_that_have_to_be():
    """Of one tool, the output is its arguments; of any, it is an array of calls."""
    named = chat(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}})
    required = chat(MODEL, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)

    assert json.loads(named.sampling.structured_output.text) == PARAMETERS
    schema = json.loads(required.sampling.structured_output.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["weather", "clock"]
    assert (named.sampling.structured_output.reasoning, required.sampling.structured_output.reasoning) == ("qwen3", "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_calls_that_have_to_be_stand_above_a_response_format(choice):
    """As vLLM has it; the output is as without it."""
    asked = chat(tools=[CLOCK], tool_choice=choice, response_format={"type": "json_object"})
    assert asked == chat(tools=[CLOCK], tool_choice=choice)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_response_format_beside_tools_that_may_be_called(parallel):
    """The output is calls in the model's own format, or what was asked for."""
    asked = chat(tools=[WEATHER], parallel_tool_calls=parallel, response_format={"type": "json_object"})

    wanted = asked.sampling.structured_output
    assert (wanted.kind, wanted.field, wanted.reasoning) == ("structural_tag", "response_format", "qwen3")
    calls, answer = json.loads(wanted.text)["format"]["elements"]
    assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}
    (tags,) = calls["elements"]
    (call,) = tags["tags"]
    assert (call["begin"], call["content"]) == (
        '<tool_call>\n{"name": "weather", "arguments": ', {"type": "json_schema", "json_schema": PARAMETERS},
    )  # fmt: skip
    assert (tags["stop_after_first"], asked.details.parsing.tools) == (not parallel, "hermes")


def test_a_response_format_beside_calls_of_several_forms():
    """Where calls cannot be foretold, the output is what was asked for."""
    asked = chat(
        replace(SERVED, tool_parser="mistral"), tools=[WEATHER], structured_outputs={"structural_tag": '{"format": {}}'}
    )
    wanted = asked.sampling.structured_output
    assert (wanted.kind, wanted.text, wanted.field) == (
        "structural_tag", '{"format":{}}', "structured_outputs.structural_tag",
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(ENVELOPES))
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_are_foretold_are_read(name, parallel):
    """What the structural tag of a family lets through, its parser reads as calls; and so it does the answer."""
    model = replace(SERVED, tool_parser=name, reasoning_parser="")
    asked = chat(model, tools=[WEATHER, CLOCK], parallel_tool_calls=parallel, structured_outputs={"choice": ["well"]})
    grammar = write_grammar(asked.sampling.structured_output)
    envelope = ENVELOPES[name]
    calls = [
        envelope.begins.replace("NAME", tool) + ("0" + envelope.argues if envelope.numbered else "")
        + arguments + envelope.ends
        for tool, arguments in (("weather", '{"city": "Oslo"}'), ("clock", "{}"))
    ]  # fmt: skip
    several = parallel and not envelope.single
    text = envelope.opens + envelope.separator.join(calls if several else calls[:1]) + envelope.closes

    for output in (text, "well"):
        matcher = make_matcher(VOCABULARY, grammar)
        assert matcher.consume_tokens(VOCABULARY.tokenize_str(output))
        assert matcher.is_accepting()
    message = OutputParser(asked.details.parsing, "key").message(text)
    read = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert read == [("weather", '{"city": "Oslo"}'), ("clock", "{}")][: len(read)]
    assert (len(read), message["content"]) == (2 if several else 1, None)


@pytest.mark.parametrize(
    ("parser", "told", "reasons"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek_v3", {}, False),
        ("deepseek_v3", {"thinking": True}, True),
        ("glm45", {"enable_thinking": False}, False),
        ("deepseek_r1", {"enable_thinking": False}, True),
    ],
)
def test_whether_a_model_reasons(parser, told, reasons):
    """That depends on what the chat template is told."""
    model = replace(SERVED, reasoning_parser=parser)
    asked = chat(model, chat_template_kwargs=told, response_format={"type": "json_object"}, thinking_token_budget=7)

    wanted = asked.sampling.structured_output
    assert (wanted.reasoning, wanted.thinking_tokens) == ((parser, 7) if reasons else ("", None))
    assert asked.sampling.skip_special_tokens is not reasons
    assert (asked.details is not None) is reasons


def test_a_budget_of_thoughts():
    """Without another bound output it is one; -1 is none; a server that reads no reasoning takes none."""
    wanted = chat(thinking_token_budget=7).sampling.structured_output
    assert (wanted.kind, wanted.reasoning, wanted.thinking_tokens) == ("anything", "qwen3", 7)
    assert chat(thinking_token_budget=-1) == chat()
    assert refused(MODEL, thinking_token_budget=7).param == "thinking_token_budget"


def test_a_budget_of_thoughts_in_a_completion():
    """The tokenizer looks at the prompt; so it does for structured outputs, where the server knows of reasoning."""
    model = replace(MODEL, reasoning_parser="qwen3")

    def wanted(served=model, **more):
        return parse_completion({"prompt": "x", **more}, served).sampling.structured_output

    output = wanted(thinking_token_budget=7)
    assert (output.kind, output.reasoning, output.thinking_tokens, output.prompt_thought) == (
        "anything",
        "qwen3",
        7,
        -1,
    )
    output = wanted(thinking_token_budget=0, structured_outputs={"regex": "a"})
    assert (output.kind, output.reasoning, output.thinking_tokens, output.prompt_thought) == ("regex", "qwen3", 0, -1)
    output = wanted(structured_outputs={"regex": "a"})
    assert (output.reasoning, output.thinking_tokens, output.prompt_thought) == ("qwen3", None, -1)
    assert (wanted(), wanted(thinking_token_budget=-1), wanted(MODEL, thinking_token_budget=-1)) == (None, None, None)
    assert wanted(MODEL, structured_outputs={"regex": "a"}).prompt_thought is None
    for more, served in (({"thinking_token_budget": 7}, MODEL), ({"thinking_token_budget": -2}, model)):
        with pytest.raises(ApiError) as caught:
            wanted(served, **more)
        assert (caught.value.status, caught.value.param) == (400, "thinking_token_budget")
    with pytest.raises(ApiError) as caught:
        wanted(thinking_token_budget=7, bad_words=["x"])
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(("tool_parser", "reasoning_parser"), [("openai", ""), ("", "openai_gptoss")])
def test_messages_with_headers(tool_parser, reasoning_parser):
    """Either of gpt-oss's parsers is enough for its texts to be read as messages, tools or not."""
    asked = chat(replace(MODEL, tool_parser=tool_parser, reasoning_parser=reasoning_parser))
    assert (asked.details.parsing.harmony, asked.sampling.skip_special_tokens) == (True, False)


def test_definitions_of_several_tools():
    """Each tool's schema stays a whole of its own, so that references within it find what they refer to."""
    defined = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": value}}},
            },
        }
        for name, value in (("one", 1), ("two", 1), ("three", 2))
    ]  # fmt: skip
    asked = chat(tools=defined, tool_choice="required")

    calls = json.loads(asked.sampling.structured_output.text)["items"]["anyOf"]
    parameters = [call["properties"]["parameters"] for call in calls]
    assert [each["$defs"]["a"]["const"] for each in parameters] == [1, 1, 2]
    assert len({each["$id"] for each in parameters}) == 3


def test_several_tools_with_one_id():
    """References of each are found in its own schema, whatever its author calls it."""
    tools = []
    for name, value in (("one", 1), ("two", 2)):
        schema = {"$id": "http://x/args", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": value}}}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    wanted = chat(tools=tools, tool_choice="required").sampling.structured_output

    for name, value in (("one", 1), ("two", 2)):
        assert accepts(f'[{{"name":"{name}","parameters":{{"a":{value}}}}}]', kind="json", text=wanted.text)
        assert not accepts(f'[{{"name":"{name}","parameters":{{"a":{3 - value}}}}}]', kind="json", text=wanted.text)


@pytest.mark.parametrize("asked", [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "text"}}},
    {"response_format": {"type": "json_object"}},
])  # fmt: skip
def test_arguments_are_an_object(asked):
    """A schema of anything else cannot be kept; one that allows objects, too, is kept to them."""
    text = {"type": "function", "function": {"name": "text", "parameters": {"type": "string"}}}
    assert refused(tools=[CLOCK, text], **asked).param == "tools[1].function.parameters.type"
    text["function"]["parameters"]["type"] = ["null", "object"]
    assert '"null"' not in chat(tools=[text], **asked).sampling.structured_output.text
    assert chat(tools=[text]).sampling.structured_output is None


def test_references_within_several_tools():
    """``#`` is the tool's own schema also where the output is an array of calls of any."""
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    tools = [CLOCK, {"type": "function", "function": {"name": "tree", "parameters": tree}}]
    wanted = chat(tools=tools, tool_choice="required").sampling.structured_output

    assert accepts('[{"name":"tree","parameters":{"next":{"next":{}}}}]', kind="json", text=wanted.text)
    assert not accepts('[{"name":"tree","parameters":{"next":[]}}]', kind="json", text=wanted.text)


@pytest.mark.parametrize("draft", [None, "http://json-schema.org/draft-07/schema#"])
def test_a_tool_that_refers_to_its_definitions_only(draft):
    """As generators of schemas write types with a name; draft 7 sees nothing beside a reference, so no id either."""
    whole = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"$ref": "#/definitions/Whole", "definitions": {"Whole": whole}} | ({"$schema": draft} if draft else {})
    tools = [CLOCK, {"type": "function", "function": {"name": "named", "parameters": schema}}]
    wanted = chat(tools=tools, tool_choice="required").sampling.structured_output

    assert accepts('[{"name":"named","parameters":{"a":1}}]', kind="json", text=wanted.text)
    assert not accepts('[{"name":"named","parameters":{"a":"1"}}]', kind="json", text=wanted.text)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools", {"tools": "x"}),
        ("tools[0]", {"tools": ["x"]}),
        ("tools[0].type", {"tools": [{"type": "custom"}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools[0].function.parameter", {"tools": [{"type": "function", "function": {"name": "a", "parameter": {}}}]}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": "always"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": 5}),
        ("tool_choice.type", {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}),
        (
            "tool_choice.function.name",
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            "guided_regex",
            {
                "tools": [CLOCK],
                "guided_regex": "a",
                "tool_choice": {"type": "function", "function": {"name": "clock"}},
            },
        ),
        ("thinking_token_budget", {"thinking_token_budget": -2}),
        ("thinking_token_budget", {"thinking_token_budget": 1.5}),
        ("bad_words", {"thinking_token_budget": 5, "bad_words": ["x"]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].tool_call_id", {"messages": [{**user("x"), "tool_call_id": "1"}]}),
        ("messages[0].reasoning_content", {"messages": [{**user("x"), "reasoning": "1"}]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}]},
        ),
        ("documents[0]", {"documents": [{"text": 5}]}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
    ],
)
def test_what_is_refused(param, body):
    """A form that is wrong, and what cannot be combined."""
    assert refused(**body).param == param


def test_what_a_server_was_not_started_for():
    """Calls as the model likes need a parser; templates of requests, unknown fields need a flag."""
    assert refused(MODEL, tools=[CLOCK]).param == "tool_choice"
    trusting = replace(MODEL, request_templates=True, allow_unknown_fields=True)
    assert chat(trusting, chat_template="{{ 1 }}", unheard_of=1).chat_template == "{{ 1 }}"


def test_structured_output_of_tools_names_its_field():
    """So that a schema which cannot be served is the tool's."""
    wanted = chat(tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}}).sampling
    assert wanted.structured_output == StructuredOutput(
        kind="json", text='{"type":"object"}', field="tools[0].function.parameters", reasoning="qwen3"
    )


def test_what_a_forced_call_excludes():
    """The choice excludes it, not the tool."""
    error = refused(tools=[CLOCK], tool_choice="required", min_tokens=2)
    assert (error.param, error.message) == ("min_tokens", "min_tokens: cannot be combined with tool_choice")
