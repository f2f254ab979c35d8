"""The HTTP endpoint and the limits on what clients may ask."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.declaring import setting


def _check_keys(keys: Any) -> str | None:
    plain = all(key and key.isascii() and key.isprintable() and not set(key) & set(", ") for key in keys)
    return None if plain else "keys may not be empty or hold spaces or commas"


def _check_origins(origins: Any) -> str | None:
    plain = all(origin == "*" or re.fullmatch(r"https?://[^/?#,\s]+", origin) for origin in origins)
    return None if plain else "an origin is like https://example.org, without a path; * means any"


def _check_root_path(path: Any) -> str | None:
    plain = re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", str(path))
    return None if plain else "a path begins with / and does not end with it, like /llm"


def _check_hosts(names: Any) -> str | None:
    plain = all(name == "*" or re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)
    return None if plain else "a host is a name like llm.example.org, without a port; * means any"


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The HTTP endpoint and the limits on what clients may ask."""

    trust_request_chat_template: bool = setting(
        False, help="accept chat templates in requests; a template is a program"
    )
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on; 0 takes a free one", low=0, high=65535)
    uds: str | None = setting(None, help="path of a Unix socket to listen on, instead of --host and --port")
    root_path: str | None = setting(
        None,
        help="path prefix under which a proxy serves the API (/llm): routes answer with and without it",
        check=_check_root_path,
    )
    api_key: tuple[str, ...] = setting(
        (), help="key or keys, one of which clients must send (default: none)", secret=True, check=_check_keys
    )
    api_key_file: str | None = setting(None, help="TOML file with keys and their limits, read again when it changes")
    allowed_origins: tuple[str, ...] = setting(
        (), help="origins whose pages may use the API in a browser (CORS), or * (default: none)", check=_check_origins
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        help="names that clients may call the server by besides addresses and names of private networks, or * "
        "(default: any, but none if there are no keys and --host is this machine only)",
        check=_check_hosts,
    )
    max_connections_per_address: int | None = setting(
        None, help="most open connections per client address (default: no limit)", low=1, high=2**20
    )
    max_num_queued_requests: int = setting(
        4096, help="most requests in progress; more are answered 429", low=1, high=2**20
    )
    max_num_queued_tokens: int = setting(
        2**26, help="most tokens of prompts and answers in progress; more are answered 429", low=1, high=2**40
    )
    max_num_jobs: int | None = setting(
        None,
        help="queued jobs in progress per jobs actor (default: twice the sequences of all executors)",
        low=1,
        high=2**20,
    )
    files_dir: str | None = setting(
        None,
        help="folder for clients' files and batches, shared by all ingresses and jobs actors (default with "
        "`serve`: below --data-dir, else a temporary one)",
    )
    max_file_bytes: int = setting(200 * 2**20, help="most bytes of one file", low=1, high=2**40)
    max_files_bytes: int = setting(16 * 2**30, help="most bytes of all files", low=1, high=2**50)
    max_batch_lines: int = setting(50_000, help="most requests of one batch", low=1, high=2**31)
    max_batches: int = setting(100, help="most batches in progress per key; more are answered 429", low=1, high=2**20)
    response_ttl_s: float = setting(
        3600.0, help="seconds that a response of /v1/responses is kept", low=1, high=31 * 86400
    )
    max_responses_bytes: int = setting(
        4 * 2**30, help="most bytes of responses that an ingress keeps; the oldest are dropped", low=2**20, high=2**50
    )
    max_responses_bytes_per_key: int = setting(
        2**30, help="most bytes of responses per key that an ingress keeps", low=2**20, high=2**50
    )
    max_beam_width: int = setting(
        16, help="most beams of one beam search; each takes a slot of the batch", low=1, high=64
    )
    enable_auto_tool_choice: bool = setting(False, help="let the model decide to call tools; needs --tool-call-parser")
    tool_call_parser: str | None = setting(
        None,
        help="format of the model's tool calls, by vLLM's names (docs/structured-output.md has the families)",
        choices=(
            "deepseek_v3", "deepseek_v31", "glm45", "glm47", "granite", "granite-20b-fc", "granite4", "hermes",
            "internlm", "jamba", "kimi_k2", "llama3_json", "llama4_json", "llama4_pythonic", "mistral", "openai",
            "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml",
        ),
    )  # fmt: skip
    reasoning_parser: str | None = setting(
        None,
        help="format of the model's reasoning, by vLLM's names (docs/structured-output.md has the families)",
        choices=(
            "deepseek_r1", "deepseek_v3", "glm45", "glm47", "granite", "holo2", "kimi_k2", "mistral", "openai_gptoss",
            "qwen3",
        ),
    )  # fmt: skip
    pooling_type: str | None = setting(
        None,
        help="embeddings are the final hidden state of the last token or the first (cls), or the mean over all tokens "
        "(default: as the model's files say, else the last)",
        choices=("last", "mean", "cls"),
    )
    classifier_from_token: tuple[str, ...] = setting(
        (),
        help="two tokens, the second of which says that a text is relevant: a score is how likely that is beside the "
        "first (no,yes: Qwen3-Reranker)",
    )
    max_logprobs: int = setting(
        20, help="most log probabilities per token that a request may ask for; -1: the whole vocabulary", low=-1,
        high=2**31 - 1,
    )  # fmt: skip
    enable_tokenizer_info_endpoint: bool = setting(
        False, help="let clients read the tokenizer's configuration and chat template at /tokenizer_info"
    )
    sagemaker_session_s: float | None = setting(
        None, help="seconds that a session of /invocations lasts (default: no sessions)", low=1, high=31 * 86400
    )
    tokens_only: bool = setting(
        False, help="serve only /inference/v1/generate and routes about the server; needs no tokenizer"
    )
    enable_force_include_usage: bool = setting(False, help="end every stream with its usage, even if not requested")
    enable_per_request_metrics: bool = setting(False, help="include the times of each stage in answers (`metrics`)")
    sse_keep_alive_interval: int = setting(
        0, help="seconds after which a silent stream gets a comment, for proxies; 0: none", low=0, high=86400
    )
    stream_interval: int = setting(
        1, help="least tokens of a choice per stream event, except the first", low=1, high=2**20
    )
    allow_unknown_fields: bool = setting(
        False, help="ignore unknown fields of a body, but not within its fields, instead of answering 400"
    )
    structured_output_timeout_s: float = setting(
        5.0,
        help="most seconds of computing to prepare the schema, expression or grammar of a structured output",
        low=0.1,
        high=600,
    )
    resume_timeout_s: float = setting(
        30.0,
        help="seconds that a request is kept for a client that may reconnect for the rest of its answer",
        low=0,
        high=86400,
    )
    drain_timeout_s: float = setting(
        30.0, help="seconds that running requests may still take when the server stops", low=0, high=86400
    )
