"""Bodies that are shown as examples, by route. Those of a route use every object that its body can hold."""

from __future__ import annotations

from typing import Any

Examples = dict[str, dict[str, Any]]

_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"zone": {"type": "string"}}}
_CLOCK: dict[str, Any] = {
    "name": "clock", "description": "What time is it somewhere?", "parameters": _SCHEMA, "strict": True
}  # fmt: skip
_CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
_TOOLS = [{"type": "function", "function": _CLOCK}]
_HELLO = {"role": "user", "content": "Hello!"}
_HISTORY = [
    {"role": "user", "content": "How late is it?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    {"role": "user", "content": "And now?"},
]
_CITY: dict[str, Any] = {"name": "city", "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}
_REPETITION = {"max_pattern_size": 20, "min_pattern_size": 2, "min_count": 4}
_REGEX = {"structured_outputs": {"regex": "[0-9]{1,9}"}}

COMPLETIONS: Examples = {
    "whole": {"prompt": "Once upon a time", "max_tokens": 32},
    "stream": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, **_STREAM},
    "structured": {"prompt": "A number:", **_REGEX},
    "scored": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
    "picked": {"prompt": "A good film? Yes or no:", "logprobs": 0, "logprob_token_ids": [1, 2]},
    "bounded": {"prompt": "Once upon a time", "max_tokens": 32, "repetition_detection": _REPETITION},
}
CHATS: Examples = {
    "whole": {"messages": [_HELLO], "max_tokens": 32},
    "stream": {"messages": [_HELLO], **_STREAM},
    "tools": {"messages": _HISTORY, "tools": _TOOLS, "tool_choice": "required"},
    "structured": {
        "messages": [{"role": "user", "content": "A city?"}],
        "response_format": {"type": "json_schema", "json_schema": _CITY},
    },
    "bounded": {"messages": [_HELLO], "repetition_detection": _REPETITION},
}
_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "How late is it?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me look."}]},
    {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": '{"zone": "UTC"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "12:00"}]},
]
RESPONSES: Examples = {
    "whole": {"input": "Hello!", "instructions": "Be brief.", "max_output_tokens": 32},
    "stream": {"input": "Hello!", "stream": True, "stream_options": {"include_obfuscation": False}},
    "tools": {"input": _ITEMS, "tools": [{"type": "function", **_CLOCK}], "tool_choice": "required"},
    "structured": {"input": "A city?", "text": {"format": {"type": "json_schema", **_CITY}}},
    "text": {"input": "A number:", "text": {"format": {"type": "text"}}, **_REGEX},
    "thinking": {"input": "Hello!", "reasoning": {"effort": "low"}, "metadata": {"for": "the report"}},
}
_TEXT = {"type": "text", "text": "How late is it?"}
_USE = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}}
_RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "12:00"}]}
_CONVERSATION: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [_TEXT]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Let me look.", "signature": ""}, _USE]},
        {"role": "user", "content": [_RESULT]},
    ],
    "tools": [{"name": "clock", "description": _CLOCK["description"], "input_schema": _SCHEMA, "strict": True}],
    "tool_choice": {"type": "any"},
}
_JSON = {"output_config": {"format": {"type": "json_schema", "schema": _CITY["schema"]}}}
_CLEARED = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_THINKING: dict[str, Any] = {"thinking": {"type": "adaptive"}, "context_management": _CLEARED}
MESSAGES: Examples = {
    "whole": {"messages": [_HELLO], "max_tokens": 32},
    "stream": {"messages": [_HELLO], "max_tokens": 32, "stream": True, "metadata": {"user_id": "u"}},
    "tools": {**_CONVERSATION, "max_tokens": 32},
    "structured": {"messages": [{"role": "user", "content": "A city?"}], "max_tokens": 32, **_JSON},
    "thinking": {"messages": [_HELLO], "max_tokens": 32, **_THINKING},
}
COUNTED: Examples = {"whole": {"messages": [_HELLO], **_THINKING}, "tools": {**_CONVERSATION, **_JSON}}
TOKENIZED: Examples = {"text": {"prompt": "Once upon a time"}}
TOKENIZED_CHATS: Examples = {f"chat, {name}": example for name, example in CHATS.items()}
GENERATED: Examples = {
    "whole": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "temperature": 0, "logit_bias": {"5": 1}}},
    "stream": {"token_ids": [1, 2, 3], **_STREAM},
    "structured": {"token_ids": [1, 2, 3], "sampling_params": _REGEX},
}
_ANSWER = {"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": "stop"}], "prompt_token_ids": [3, 4]}
DERENDERED_CHATS: Examples = {
    name: {"generate_response": _ANSWER, "chat_request": chat, "prompt_tokens": 2} for name, chat in CHATS.items()
} | {"alone": {"generate_response": _ANSWER}}
DERENDERED_COMPLETIONS: Examples = {
    name: {"generate_responses": [_ANSWER], "completion_request": completion, "prompt_tokens": [2]}
    for name, completion in COMPLETIONS.items()
} | {"alone": {"generate_responses": [_ANSWER]}}
