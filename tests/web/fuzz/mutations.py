"""Requests that no client should send, as bytes: JSON, headers and framing gone wrong, made from (seed, number)."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any

FILE, BATCH, RESPONSE = f"file-{'0' * 24}", f"batch_{'1' * 24}", f"resp_{'2' * 32}"
"""Stand for things that are there (as long as their ids), which whoever sends a case puts in."""
UPLOADS = "/v1/files"
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 5}),
    ("/v1/completions", {"prompt": ["one", "two words"], "n": 2, "stream": True, "stop": ["dear"]}),
    ("/v1/completions", {"prompt": [1, 2, 3], "logprobs": 2, "echo": True, "prompt_logprobs": 1, "seed": 7}),
    ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2, "temperature": 0, "length_penalty": 1.0}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1.0}, "stop_token_ids": [9], "top_k": 3}),
    ("/v1/completions", {"prompt": "x", "bad_words": ["b"], "allowed_token_ids": [1, 2], "timeout": 20, "min_p": 0.1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True,
                              "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "text", "text": "be"}]},
                                           {"role": "user", "content": "hi", "name": "x"}],
                              "top_logprobs": 3, "logprobs": True, "chat_template_kwargs": {"a": {"b": [1]}},
                              "metadata": {"a": "b"}, "user": "u", "max_completion_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [
                                  {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                                           {"role": "tool", "tool_call_id": "c", "content": "1"}]}),
    ("/v1/responses", {"input": "hi", "instructions": "be", "max_output_tokens": 5, "previous_response_id": RESPONSE,
                       "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c", "output": "1"}],
                       "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                       "tool_choice": "auto", "stream": True, "store": False}),
    ("/v1/responses", {"input": "hi", "background": True, "stream": True, "temperature": 0.5}),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["dear"],
                      "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
                      "stream": True, "metadata": {"user_id": "u"}}),
    ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                      "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                      "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                                   {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f",
                                                                      "input": {"a": [1]}}]},
                                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                                                 "content": [{"type": "text", "text": "1"}]}]}]}),
    ("/v1/messages/count_tokens", {"system": "be", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/embeddings", {"input": ["A cat", "A dog"], "encoding_format": "base64", "dimensions": 8}),
    ("/v1/embeddings", {"input": [1, 2, 3], "user": "u"}),
    ("/v1/batches", {"input_file_id": FILE, "endpoint": "/v1/completions", "completion_window": "24h",
                     "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 86400}}),
    (UPLOADS, {"purpose": "batch", "file": '{"custom_id": "a"}', "expires_after[seconds]": "3600"}),
    ("/tokenize", {"prompt": "one two", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/api/requests/x/cancel", {}),
    ("/api/actors/tokenizer/tokenizer-0/drain", {}),
)  # fmt: skip
LOOKUPS = (
    *(f"/v1/responses/{RESPONSE}", f"/v1/responses/{RESPONSE}?stream=true", f"/v1/responses/{RESPONSE}/input_items"),
    *(f"/v1/responses/{RESPONSE}/cancel", f"/v1/files/{FILE}", f"/v1/files/{FILE}/content", "/v1/files", "/v1/batches"),
    *(f"/v1/batches/{BATCH}", f"/v1/batches/{BATCH}/cancel", "/api/history", "/api/blocks?replica=executor-0"),
    *("/v1/models/fake-model", "/debug/state", "/static/app.js"),
)
QUERIES = ("starting_after", "stream", "order", "after", "limit", "purpose", "span_s", "block", "tier", "replica")
ODD_TEXTS = (
    *("", "-1", "--1", "0", "5", "9" * 9, "9" * 30, "%C2%B2", "%D9%A3", "1.5", "nan", "inf", "true", "%00", "%ff"),
    *("asc", "host", "x" * 300, "%0d%0aX: y", "..%2f..", RESPONSE, FILE),
)
FORM = b"multipart/form-data; boundary=b"
MARK = "@deep@"
"""Stands for something nested too deep for a JSON encoder to write."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 64, 65, 1e308, -1e308, 5e-324, 0.5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(float("nan"), float("inf"), "", "x", "\0", "\ud800", "é" * 300, "x" * 5000, "[1]", "\n\x1b[31m", MARK),
    *('{"a":' * 300 + "1" + "}" * 300, "[" * 1000 + "]" * 1000, '{"a": 1', "{}"),
    *([], [[]], [None], [0] * 5000, ["x"] * 2000, [-1], [999], [1000], [2**70], {}, {"": {}}, {"type": "text"}),
    *(
        {"role": "user"},
        [{"role": "user", "content": None}],
        [{"role": "tool", "content": "x"}],
        {"1000": 1},
        {"-1": 1},
    ),
)
NAMES = ("n", "stop", "max_tokens", "metadata", "response_format", "tools", "logit_bias", "temperature", "best_of",
         "x", "suffix", "stream", "top_p", "min_tokens", "priority", "cache_salt", "truncate_prompt_tokens",
         "guided_json", "stream_options", "model", "prompt", "messages", "chat_template_kwargs", "timeout", "seed",
         "input", "instructions", "previous_response_id", "conversation", "include", "reasoning", "text", "tool_choice",
         "system", "stop_sequences", "thinking", "encoding_format", "dimensions", "tokens", "input_file_id", "endpoint",
         "background", "store", "é\ud800")  # fmt: skip
METHODS = (b"GET", b"PUT", b"OPTIONS", b"DELETE", b"post", b"PATCH", b"CONNECT", b"\xff", b"FOO")
PATHS = (b"/", b"/v1/models", b"/v1/models/%00", b"//", b"/v1/completions/", b"/v1/completions?x=%ff", b"*",
         b"/%2e%2e/", b"http://x/v1/completions", b"/metrics", b"/health", b"/v1/\xff", b"/" + b"a" * 9000)  # fmt: skip
HEADERS = (
    b"Idempotency-Key: ", b"Idempotency-Key: k", b"Idempotency-Key: " + b"k" * 300, b"Last-Event-ID: 1.1",
    b"Last-Event-ID: -1", b"Last-Event-ID: " + b"9.9," * 1000, b"Expect: 100-continue", b"Expect: x",
    b"Content-Encoding: gzip", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", b"X-Request-Id: a b",
    b"X-Request-Id: " + b"i" * 500, b"Authorization: Bearer \xff", b"X: \xff\xfe", b"X: " + b"y" * 9000, b"no colon",
    b": empty", b"X : space", b"Upgrade: websocket\r\nConnection: Upgrade", b"Content-Length: 5",
    b"Cookie: " + b"a=b;" * 900,
    b"Content-Type: \xf0", b"Content-Type: multipart/form-data", b"Host: [", b"Range: bytes=0-", b"X:\r\n folded",
    b"Origin: https://x\r\nAccess-Control-Request-Method: POST", b"Content-Length: 99999999999999999999",
)  # fmt: skip


@dataclass
class Case:
    """One request. ``pieces`` are sent one after another. ``whole``: a server must answer it."""

    method: bytes = b"POST"
    path: bytes = b""
    headers: list[bytes] = field(default_factory=lambda: [b"Host: x", b"Connection: close"])
    body: bytes = b""
    chunked: bool = False
    cut: int | None = None
    """Send only so many bytes."""
    whole: bool = True

    def pieces(self, rng: random.Random) -> list[bytes]:
        framed = self.body
        if self.chunked:
            length = (
                f"{len(self.body):x}".encode() if rng.random() < 0.8 else rng.choice([b"zz", b"-1", b"f" * 17, b""])
            )
            self.headers.append(b"Transfer-Encoding: chunked")
            framed = length + b"\r\n" + self.body + b"\r\n0\r\n\r\n"
        else:
            self.headers.append(b"Content-Length: %d" % len(self.body))
        data = b"%s %s HTTP/1.1\r\n%s\r\n\r\n" % (self.method, self.path, b"\r\n".join(self.headers)) + framed
        data = data[: self.cut]
        at = rng.randrange(len(data)) if data and rng.random() < 0.2 else len(data)
        return [data[:at], data[at:]] if at < len(data) else [data]


def make_case(seed: int, number: int) -> tuple[Case, list[bytes]]:
    """The case, and its bytes."""
    rng = random.Random(f"{seed}-{number}")
    path, body = rng.choice(BODIES)
    body = copy.deepcopy(body)
    case = Case(path=path.encode())
    if rng.random() < 0.1:
        _look_up(rng, case)
    else:
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            _mutate_json(rng, body)
        case.headers.append(b"Content-Type: " + (FORM if path == UPLOADS else b"application/json"))
        case.body = _write_form(body) if path == UPLOADS else _write(rng, body)
    for mutate in rng.choices(_ON_CASES, weights=(12, 2, 2, 1, 2, 2, 1), k=rng.choice((0, 1, 1, 2))):
        mutate(rng, case)
    return case, case.pieces(rng)


def _mutate_json(rng: random.Random, body: dict[str, Any]) -> None:
    """Change, add or remove one value, at any depth."""
    at: Any = body
    while True:
        keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.6:
            at = at[key]
            continue
        break
    match rng.randrange(8):
        case 0:
            del at[key]
        case 1 | 2 | 3:
            body[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
        case _:
            at[key] = copy.deepcopy(rng.choice(ODD))


def _write(rng: random.Random, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7)
    depth = rng.choice((20, 253, 300, 1023, 1025, 20_000))
    brackets = ("[", "]") if rng.random() < 0.5 else ('{"a":', "}")
    text = text.replace(json.dumps(MARK), brackets[0] * depth + "1" + brackets[1] * depth)
    if rng.random() < 0.05:
        text = text.replace("{", '{"n": 0, "n": 1, "prompt": "twice", ', 1)
    return text.encode("utf-8", "surrogatepass")


def _write_form(fields: dict[str, Any]) -> bytes:
    parts = b""
    for name, value in fields.items():
        named = f'--b\r\nContent-Disposition: form-data; name="{name}"' + ('; filename="f"' if name == "file" else "")
        text = value if isinstance(value, str) else repr(value)
        parts += f"{named}\r\n\r\n{text}\r\n".encode("utf-8", "surrogatepass")
    return parts + b"--b--\r\n"


def _look_up(rng: random.Random, case: Case) -> None:
    """Ask for what is there, oddly."""
    case.method = rng.choice((b"GET", b"GET", b"GET", b"POST", b"HEAD"))
    path = rng.choice(LOOKUPS)
    for name in rng.sample(QUERIES, rng.choice((0, 1, 1, 2))):
        path += f"{'&' if '?' in path else '?'}{name}={rng.choice(ODD_TEXTS)}"
    case.path = path.encode()


def _flip(rng: random.Random, case: Case) -> None:
    data = bytearray(case.body)
    for _ in range(rng.choice((1, 1, 3, 20)) if data else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    case.body = bytes(data)


def _truncate(rng: random.Random, case: Case) -> None:
    case.body = case.body[: rng.randrange(len(case.body) + 1)]


def _insert(rng: random.Random, case: Case) -> None:
    at = rng.randrange(len(case.body) + 1)
    extra = rng.choice(
        (b"\xff", b"\0", b",", b"}", b"NaN", b"\\ud800", b"[" * 2000, b" " * 70_000, b"/**/", b"\xef\xbb\xbf")
    )
    case.body = case.body[:at] + extra + case.body[at:]


def _header(rng: random.Random, case: Case) -> None:
    case.headers.append(rng.choice(HEADERS))
    if rng.random() < 0.1:
        case.headers += [b"X-%d: x" % index for index in range(130)]


def _route(rng: random.Random, case: Case) -> None:
    if rng.random() < 0.6:
        case.method = rng.choice(METHODS)
    if rng.random() < 0.6:
        case.path = rng.choice(PATHS)


def _chunk(rng: random.Random, case: Case) -> None:
    case.chunked = True


def _cut(rng: random.Random, case: Case) -> None:
    """Send a part only: the server has to give up."""
    case.cut, case.whole = rng.randrange(1, 200), False


_ON_CASES = (
    _header,
    _flip,
    _truncate,
    _cut,
    _route,
    _chunk,
    _insert,
)
