"""Every setting of Pagebus, once: name, default, bounds and help text.

The flag is ``--max-model-len``, the environment variable ``PAGEBUS_MAX_MODEL_LEN``, and the key in the TOML file given
with ``--config`` is ``max_model_len`` (or ``max-model-len``). The command line wins over the environment, that over the
file, and the file over the default. Names are vLLM's where they mean the same. Reading the three sources lives in
:mod:`actors.settings_sources`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

KINDS = ("ingress", "jobs", "tokenizer", "scheduler", "executor", "detokenizer")
"""The kinds of actor."""
BUS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "memory")
DTYPE_ALIASES = {"float": "float32", "half": "float16"}


class SettingsError(ValueError):
    """A setting that is unknown, out of bounds or in conflict with another; the text names the flag."""


def flag_of(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``; the model is a positional argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def setting(
    default: T,
    *,
    help: str,
    group: str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    check: Callable[[Any], str | None] | None = None,
    secret: bool = False,
) -> T:
    """One field. ``low`` and ``high`` are inclusive; ``check`` returns what is wrong with a value, or None.

    A ``secret`` is handed to child processes in the environment, never on a command line.
    """
    metadata = {
        "help": help,
        "group": group,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "check": check,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


def _check_bus(url: Any) -> str | None:
    scheme = urlsplit(str(url)).scheme
    if scheme in BUS_SCHEMES:
        return None
    return f"needs a URL that starts with one of {', '.join(s + '://' for s in BUS_SCHEMES)}"


def _check_block_size(value: Any) -> str | None:
    return None if value % 16 == 0 else "must be a multiple of 16"


def _check_name(value: Any) -> str | None:
    allowed = all(c.isalnum() or c in "-_." for c in str(value)) and str(value).isascii()
    return None if value and allowed else "may hold only letters, digits, '-', '_' and '.', and not be empty"


def _check_keys(keys: Any) -> str | None:
    plain = all(key and key.isascii() and key.isprintable() and not set(key) & set(", ") for key in keys)
    return None if plain else "keys may not be empty or hold spaces or commas"


def _check_origins(origins: Any) -> str | None:
    plain = all(origin == "*" or re.fullmatch(r"https?://[^/?#,\s]+", origin) for origin in origins)
    return None if plain else "an origin is like https://example.org, without a path; * means any"


def _check_endpoints(paths: Any) -> str | None:
    plain = all(path.strip().startswith("/") for path in str(paths).split(","))
    return None if plain else "an endpoint is a path like /health"


def _check_otlp(endpoint: Any) -> str | None:
    from actors.otlp import problem_of

    return problem_of(str(endpoint))


def _check_fraction(value: Any) -> str | None:
    return None if 0 < value <= 1 else "must be more than 0 and at most 1"


MODEL, SERVICE, PROCESSES, ENGINE, MEMORY, LOGGING = "model", "service", "processes", "engine", "memory", "logging"
GROUP_HELP = {
    MODEL: "which model is served, and under which name",
    SERVICE: "the HTTP endpoint and the limits on what clients may ask",
    PROCESSES: "the bus, and how many actors of each kind run",
    ENGINE: "how steps are computed",
    MEMORY: "how much memory the key-value cache takes",
    LOGGING: "what is written to standard error",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One deployment's settings, checked when made.

    Raises:
        SettingsError: a value is out of its bounds or conflicts with another.
    """

    model: str = setting("", help="folder or Hugging Face id of the model; empty: the small shipped one", group=MODEL)
    tokenizer: str | None = setting(None, help="folder or id of the tokenizer (default: the model's)", group=MODEL)
    served_model_name: tuple[str, ...] = setting(
        (), help="name or names clients use for the model (default: MODEL as given)", group=MODEL
    )
    revision: str | None = setting(None, help="branch, tag or commit of the model on the hub", group=MODEL)
    chat_template: str | None = setting(
        None, help="a Jinja chat template, or the path of a file with one (default: the model's)", group=MODEL
    )
    trust_request_chat_template: bool = setting(
        False, help="let requests bring a chat template of their own, which is a program", group=SERVICE
    )
    generation_config: str = setting(
        "auto",
        help="where sampling defaults come from: the model's generation_config.json (auto) or none (vllm)",
        group=MODEL,
        choices=("auto", "vllm"),
    )
    name: str = setting(
        "pagebus", help="name of the deployment; it prefixes every key on the bus", group=PROCESSES, check=_check_name
    )
    bus: str | None = setting(
        None,
        help="URL of the bus: redis://, rediss://, unix://, redis+sentinel:// or memory:// "
        "(default: a private redis-server, or everything in one process where there is none)",
        group=PROCESSES,
        check=_check_bus,
    )
    redis_ca_file: str | None = setting(
        None, help="certificates that vouch for a Redis with TLS (default: the system's)", group=PROCESSES
    )
    redis_cert_file: str | None = setting(
        None, help="certificate to show to a Redis that wants one of its clients", group=PROCESSES
    )
    redis_key_file: str | None = setting(None, help="key of --redis-cert-file", group=PROCESSES)
    allow_open_redis: bool = setting(
        False, help="use a Redis on another machine that asks for no password", group=PROCESSES
    )
    host: str = setting("127.0.0.1", help="address to listen on", group=SERVICE)
    port: int = setting(8000, help="port to listen on; 0 takes a free one", group=SERVICE, low=0, high=65535)
    api_key: tuple[str, ...] = setting(
        (),
        help="key or keys, one of which a client must send (default: none needed)",
        group=SERVICE,
        secret=True,
        check=_check_keys,
    )
    api_key_file: str | None = setting(
        None, help="TOML file with keys and their limits, read again when it changes", group=SERVICE
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        help="origins whose pages browsers may let use the API, or * (default: none)",
        group=SERVICE,
        check=_check_origins,
    )
    max_connections_per_address: int | None = setting(
        None, help="connections that one address may have open (default: any number)", group=SERVICE, low=1, high=2**20
    )
    executors: int = setting(1, help="executors to start, one per GPU", group=PROCESSES, low=1, high=1024)
    tokenizers: int = setting(1, help="tokenizers to start", group=PROCESSES, low=1, high=1024)
    schedulers: int = setting(
        1, help="schedulers to start: one leads, others stand by", group=PROCESSES, low=1, high=16
    )
    detokenizers: int = setting(1, help="detokenizers to start", group=PROCESSES, low=1, high=1024)
    ingresses: int = setting(
        1,
        help="HTTP servers to start; they share the port, or take one each with --port 0",
        group=PROCESSES,
        low=1,
        high=1024,
    )
    job_actors: int = setting(
        1, help="actors to start that take queued jobs; 0: jobs wait", group=PROCESSES, low=0, high=1024
    )
    device: str = setting("auto", help="where the model is computed", group=ENGINE, choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        help="number format of weights and activations (auto: the model's own)",
        group=ENGINE,
        choices=("auto", "float32", "bfloat16", "float16", "float", "half"),
    )
    load_format: str = setting(
        "auto",
        help="dummy: random weights, to measure without a download",
        group=MODEL,
        choices=("auto", "safetensors", "dummy"),
    )
    seed: int = setting(0, help="seed of dummy weights", group=ENGINE, low=0, high=2**63 - 1)
    max_model_len: int | None = setting(
        None, help="longest prompt plus output, tokens (default: the model's)", group=ENGINE, low=1, high=2**24
    )
    max_num_seqs: int = setting(256, help="most sequences in one step", group=ENGINE, low=1, high=8192)
    max_num_batched_tokens: int | None = setting(
        None, help="most tokens in one step (default: 8192 on CUDA, 2048 on CPU)", group=ENGINE, low=1, high=2**20
    )
    block_size: int = setting(
        16, help="tokens in one block of the cache", group=MEMORY, low=16, high=1024, check=_check_block_size
    )
    kv_cache_dtype: str = setting(
        "auto",
        help="number format of the cache (auto: the model's); fp8, which is fp8_e4m3, holds twice as many tokens",
        group=MEMORY,
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    calculate_kv_scales: bool = setting(
        True,
        help="find an fp8 cache's scales at start where the checkpoint has none (else they are 1)",
        group=MEMORY,
    )
    gpu_memory_utilization: float = setting(
        0.9, help="share of the GPU's memory that may be used", group=MEMORY, check=_check_fraction
    )
    num_gpu_blocks_override: int | None = setting(
        None, help="number of blocks of the cache, whatever the memory", group=MEMORY, low=1, high=2**30
    )
    kv_cache_memory_bytes: int | None = setting(
        None, help="bytes for the cache, instead of a share of the GPU", group=MEMORY, low=1, high=2**50
    )
    cpu_kv_cache_gib: float = setting(
        1.0, help="GiB for the cache when the device is the CPU", group=MEMORY, low=0.001, high=4096
    )
    swap_space: float = setting(
        4.0,
        help="GiB of host memory per executor, for blocks that the device has no room for; 0: none",
        group=MEMORY,
        low=0,
        high=65536,
    )
    preemption_mode: str = setting(
        "auto",
        help="what happens to blocks of a sequence that must give way: copied to the host (swap), computed again "
        "(recompute), or whatever is faster by measured rates (auto)",
        group=MEMORY,
        choices=("auto", "swap", "recompute"),
    )
    enable_prefix_caching: bool = setting(True, help="reuse the blocks of prompts that begin alike", group=MEMORY)
    enforce_eager: bool = setting(False, help="do not use CUDA graphs", group=ENGINE)
    max_cudagraph_capture_size: int | None = setting(
        None,
        help="most tokens of a step that runs from a CUDA graph (default: 4096, fewer for models whose steps compute "
        "for longer than they take to launch)",
        group=ENGINE,
        low=1,
        high=8192,
    )
    attention_backend: str = setting(
        "auto",
        help="what computes attention on CUDA: Pagebus's own kernels (triton), those for decodes and torch's cuDNN "
        "attention for prompts wherever it can (torch), or whichever was measured to be faster for the shape (auto)",
        group=ENGINE,
        choices=("auto", "triton", "torch"),
    )
    deterministic: bool = setting(
        False,
        help="compute each sequence in the same way whatever else is in the batch, so that a request gives the same "
        "tokens alone and in company; slower, without the prefix cache and CUDA graphs, CUDA only",
        group=ENGINE,
    )
    pipeline_depth: int = setting(
        4, help="most step plans in flight per executor; more than two only while steps are short", group=ENGINE, low=1,
        high=8,
    )  # fmt: skip
    step_timeout_s: float = setting(
        300.0,
        help="seconds without a finished step after which an executor with steps to compute counts as hung and ends",
        group=ENGINE,
        low=1,
        high=86400,
    )
    scheduling_policy: str = setting(
        "fcfs",
        help="fcfs: first come, first served; priority: by the priority number of the request, lower first",
        group=ENGINE,
        choices=("fcfs", "priority"),
    )
    priority_aging_s: float = setting(
        30.0, help="seconds of waiting that make up for one step of priority", group=ENGINE, low=0.001, high=1e9
    )
    itl_target_ms: float | None = setting(
        None,
        help="longest step with running streams to aim at: it limits how much of long prompts is read beside them",
        group=ENGINE,
        low=0.1,
        high=1e6,
    )
    ttft_target_ms: float | None = setting(
        None,
        help="time to the first token from which on --itl-target-ms may be exceeded, up to twofold",
        group=ENGINE,
        low=0.1,
        high=1e9,
    )
    max_num_queued_requests: int = setting(
        4096, help="requests that may be under way; more are answered 429", group=SERVICE, low=1, high=2**20
    )
    max_num_queued_tokens: int = setting(
        2**26,
        help="tokens of prompts and answers that may be under way; more are answered 429",
        group=SERVICE,
        low=1,
        high=2**40,
    )
    max_num_jobs: int | None = setting(
        None,
        help="queued jobs that one jobs actor has under way (default: twice what all executors have sequences for)",
        group=SERVICE,
        low=1,
        high=2**20,
    )
    files_dir: str | None = setting(
        None,
        help="folder for files and batches of clients, which all ingresses and jobs actors share (default with "
        "`serve`: below --data-dir, else a temporary one)",
        group=SERVICE,
    )
    max_file_bytes: int = setting(200 * 2**20, help="bytes of one file", group=SERVICE, low=1, high=2**40)
    max_files_bytes: int = setting(16 * 2**30, help="bytes of all files", group=SERVICE, low=1, high=2**50)
    max_batch_lines: int = setting(50_000, help="requests of one batch", group=SERVICE, low=1, high=2**31)
    response_ttl_s: float = setting(
        3600.0, help="seconds that a response of /v1/responses is kept", group=SERVICE, low=1, high=31 * 86400
    )
    max_beam_width: int = setting(
        16,
        help="most beams of one beam search, each of which takes a place in the batch",
        group=SERVICE,
        low=1,
        high=64,
    )
    enable_auto_tool_choice: bool = setting(
        False, help="let models call tools as they like; needs --tool-call-parser", group=SERVICE
    )
    tool_call_parser: str | None = setting(
        None,
        help="how the model writes calls of tools: hermes (Qwen too), llama3_json or mistral",
        group=SERVICE,
        choices=("hermes", "llama3_json", "mistral"),
    )
    reasoning_parser: str | None = setting(
        None,
        help="how the model marks its reasoning: deepseek_r1 (the chat template opens the tag) or qwen3",
        group=SERVICE,
        choices=("deepseek_r1", "qwen3"),
    )
    pooling_type: str = setting(
        "last",
        help="embeddings are the final hidden state of the last token, or the mean over all tokens",
        group=SERVICE,
        choices=("last", "mean"),
    )
    allow_unknown_fields: bool = setting(
        False, help="ignore fields of requests that are not known, instead of answering 400", group=SERVICE
    )
    structured_output_timeout_s: float = setting(
        5.0,
        help="seconds within which the schema, expression or grammar of a structured output must be made ready",
        group=SERVICE,
        low=0.1,
        high=600,
    )
    lease_ttl_s: float = setting(
        5.0, help="seconds after which a silent actor counts as dead", group=PROCESSES, low=0.2, high=300
    )
    resume_timeout_s: float = setting(
        30.0,
        help="seconds that a request is kept for a client that may come back for the rest of its answer",
        group=SERVICE,
        low=0,
        high=86400,
    )
    drain_timeout_s: float = setting(
        30.0, help="seconds that running requests get when the server stops", group=SERVICE, low=0, high=86400
    )
    log_level: str = setting(
        "info", help="least severe lines to write", group=LOGGING, choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "auto",
        help="auto: text on a terminal, JSON lines otherwise",
        group=LOGGING,
        choices=("auto", "console", "json"),
    )
    data_dir: str | None = setting(
        None, help="folder of the private redis-server (default: a temporary one)", group=PROCESSES
    )
    actor_name: str | None = setting(
        None, help="name of this actor on the bus (default: made unique)", group=PROCESSES, check=_check_name
    )
    enable_log_requests: bool = setting(
        False,
        help="write lines for every request: its parameters (with --log-level debug its prompt too) and its end",
        group=LOGGING,
    )
    max_log_len: int | None = setting(
        None,
        help="characters, or token ids, of a prompt that are logged (default: all)",
        group=LOGGING,
        low=0,
        high=2**30,
    )
    disable_access_log_for_endpoints: str | None = setting(
        None,
        help="routes whose answers --enable-log-requests leaves out, separated by commas (/health,/metrics)",
        group=LOGGING,
        check=_check_endpoints,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        help="URL of an OpenTelemetry collector that gets a trace of every request (default: none are made)",
        group=LOGGING,
        check=_check_otlp,
    )
    span_dir: str | None = setting(
        None,
        help="folder in which scheduler and executors write what they did when, step by step, as they stop "
        "(default: nothing is noted)",
        group=LOGGING,
    )
    gpu_lock_dir: str | None = setting(
        None,
        help="folder in which executors of one machine agree who takes which GPU (default: the first one they see)",
        group=PROCESSES,
    )
    threads: int | None = setting(
        None, help="threads of an executor on the CPU (default: its share of the cores)", group=ENGINE, low=1, high=4096
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value is not None and (value != spec.default or spec.default is not None):
                _check_value(spec.name, value, spec.metadata)
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise SettingsError("--enable-auto-tool-choice needs --tool-call-parser")
        if self.deterministic:  # blocks that were computed as decodes differ in their last bits from those of prompts
            object.__setattr__(self, "enable_prefix_caching", False)
            object.__setattr__(self, "enforce_eager", True)  # see "Deterministic outputs" in docs/attention.md

    @property
    def counts(self) -> dict[str, int]:
        """How many actors of each kind are wanted."""
        return {
            "ingress": self.ingresses,
            "jobs": self.job_actors,
            "tokenizer": self.tokenizers,
            "scheduler": self.schedulers,
            "executor": self.executors,
            "detokenizer": self.detokenizers,
        }

    def to_args(self) -> list[str]:
        """Command line that gives these settings again, without secrets: only what differs from the defaults."""
        from actors.settings_sources import to_args

        return to_args(self)

    def to_env(self) -> dict[str, str]:
        """The secrets among these settings, as environment variables: what :meth:`to_args` leaves out."""
        from actors.settings_sources import to_env

        return to_env(self)

    def replace(self, **changes: Any) -> Settings:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)


def _check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Bounds, choices and the field's own check."""
    flag = flag_of(name)
    low, high, choices, check = (metadata[key] for key in ("low", "high", "choices", "check"))
    if choices and value not in choices:
        raise SettingsError(f"{flag} {value!r}: choose one of {', '.join(choices)}")
    if isinstance(value, float) and value != value:
        raise SettingsError(f"{flag}: not a number")
    if low is not None and value < low:
        raise SettingsError(f"{flag} {value}: must be at least {low}")
    if high is not None and value > high:
        raise SettingsError(f"{flag} {value}: must be at most {high}")
    problem = check(value) if check is not None else None
    if problem:
        hidden = metadata["secret"] or "@" in str(value)  # a URL may have a password
        raise SettingsError(f"{flag}{'' if hidden else f' {value!r}'}: {problem}")
