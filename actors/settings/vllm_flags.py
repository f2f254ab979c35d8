"""Flags of ``vllm serve`` for which there is no setting here.

What asks for how things are anyway is taken, with a note; what cannot be had is refused, with a word about what there
is instead. Both also hold for the arguments of ``LLM``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ANY = ("*",)
"""Every value is taken."""


@dataclass(frozen=True, slots=True)
class Flag:
    """``names``: the flags, with spaces between. ``text``: how it is here, or what to use. ``taken``: values that
    change nothing (of a switch ``ANY``: giving it changes nothing); all others are refused."""

    names: str
    text: str
    taken: tuple[str, ...] = ()
    switch: bool = False

    def takes(self, value: str) -> bool:
        return self.taken == ANY or value in self.taken


ONE_GPU = "a model has to fit one GPU (no tensor, pipeline or expert parallelism); more GPUs serve more requests with "
ADAPTERS = "adapters are not supported: merge one into its model, and serve that"
GRAPHS = "see --enforce-eager, --max-cudagraph-capture-size and `pagebus compile-kernels`"
PROXY = "put a proxy in front"
NO_MEDIA = "models here read text only"
MACHINES = "start `pagebus actor KIND --bus redis://...` on each machine"
SPECULATION = "speculative decoding is not supported"
CONFIG = "change config.json in a copy of the model's folder (rope types: default, linear, llama3)"
TAKEN = (
    Flag("--trust-remote-code", "code of a model's repository is never run", ANY, switch=True),
    Flag("--code-revision", "code of a model's repository is never run", ANY),
    Flag("--enable-chunked-prefill", "prompts are always read in chunks (--max-num-batched-tokens)", ANY, switch=True),
    Flag("--async-scheduling", "steps are always planned ahead (--pipeline-depth)", ANY, switch=True),
    Flag("--disable-log-requests", "requests are logged only with --enable-log-requests", ANY, switch=True),
    Flag("--disable-log-stats", "no statistics are logged; they are at /metrics", ANY, switch=True),
    Flag("--disable-uvicorn-access-log", "answers are logged only with --enable-log-requests", ANY, switch=True),
    Flag("--uvicorn-log-level", "--log-level says what is logged", ANY),
    Flag(
        "--enable-log-deltas --no-enable-log-deltas", "outputs are logged as a whole, when they end", ANY, switch=True
    ),
    Flag("--enable-server-load-tracking", "/load always answers", ANY, switch=True),
    Flag("--enable-prompt-tokens-details", "usage always tells cached tokens", ANY, switch=True),
    Flag("--enable-request-id-headers", "every answer has X-Request-Id", ANY, switch=True),
    Flag("--disable-custom-all-reduce", "there is one GPU per executor, and nothing to reduce", ANY, switch=True),
    Flag("--collect-detailed-traces", "a trace always has all hops", ANY),
    Flag("--prefix-caching-hash-algo", "blocks are hashed by keyed BLAKE2b", ANY),
    Flag("--language-model-only", NO_MEDIA, ANY, switch=True),
    Flag("--enable-reasoning", "--reasoning-parser is enough", ANY, switch=True),
    Flag("--task --runner --convert", "a server generates and embeds alike", ("auto", "generate", "embed", "none")),
    Flag("--distributed-executor-backend", "executors are processes (--executors)", ("mp", "uni")),
    Flag("--guided-decoding-backend", "outputs are structured by llguidance", ("auto", "guidance", "xgrammar")),
    Flag("--chat-template-content-format", "templates get contents as text", ("auto", "string")),
    Flag("--tokenizer-mode --config-format --model-impl", "only the usual one is supported", ("auto", "hf", "vllm")),
    Flag("--response-role", "answers are the assistant's", ("assistant",)),
    Flag("--performance-mode", "see --max-num-seqs, --max-num-batched-tokens and --itl-target-ms", ("balanced",)),
    Flag("--logprobs-mode", "log probabilities are those before sampling parameters", ("raw_logprobs",)),
)
"""That ask, at least with some values, for how things are anyway."""
REFUSED = (
    Flag("--tensor-parallel-size -tp --pipeline-parallel-size -pp", ONE_GPU + "--executors N", ("1",)),
    Flag("--data-parallel-size -dp", "use --executors N: an executor is a replica with a GPU of its own", ("1",)),
    Flag("--enable-expert-parallel", ONE_GPU + "--executors N", switch=True),
    Flag("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp", ONE_GPU + "--executors", ("1",)),
    Flag("--data-parallel-size-local --data-parallel-address --data-parallel-rank --data-parallel-rpc-port", MACHINES),
    Flag("--nnodes --node-rank --master-addr --master-port", MACHINES),
    Flag("--headless", MACHINES, switch=True),
    Flag("--quantization -q", "quantized weights are not supported; --kv-cache-dtype fp8 halves the cache", ("None",)),
    Flag("--enable-lora", ADAPTERS, switch=True),
    Flag("--lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype", ADAPTERS),
    Flag("--speculative-config --speculative-model --num-speculative-tokens --spec-method --spec-model", SPECULATION),
    Flag("--rope-scaling --rope-theta --hf-overrides", CONFIG),
    Flag("--override-generation-config", "change generation_config.json in a copy of the model's folder"),
    Flag("--compilation-config -cc --cudagraph-capture-sizes --cuda-graph-sizes --optimization-level -O", GRAPHS),
    Flag("--max-seq-len-to-capture", GRAPHS),
    Flag(
        "--no-enable-chunked-prefill",
        "prompts are always read in chunks, of at most --max-num-batched-tokens",
        switch=True,
    ),
    Flag("--no-async-scheduling", "use --pipeline-depth 1", switch=True),
    Flag("--long-prefill-token-threshold", "use --itl-target-ms, which limits prompts beside streams", ("0",)),
    Flag("--cpu-offload-gb", "weights stay on the GPU; --swap-space is host memory for the cache", ("0",)),
    Flag("--kv-offloading-size", "use --swap-space N, host memory for the cache in GiB"),
    Flag("--kv-offloading-backend", "--swap-space is host memory for the cache", ("native",)),
    Flag("--kv-transfer-config --kv-events-config --ec-transfer-config", "prompts and decodes share executors"),
    Flag("--enable-sleep-mode", "an executor may be ended, and started again", switch=True),
    Flag("--download-dir", "set HF_HUB_CACHE"),
    Flag("--hf-token", "set HF_TOKEN"),
    Flag("--tokenizer-revision", "give the tokenizer as a folder (--tokenizer)"),
    Flag("--ssl-keyfile --ssl-certfile --ssl-ca-certs --root-path --middleware --uds", PROXY),
    Flag("--allowed-methods --allowed-headers", "--allowed-origins is enough: the API's own are allowed"),
    Flag("--allow-credentials", "pages send keys as a header; cookies are not used", switch=True),
    Flag("--disable-fastapi-docs", "/docs is one page; hide it by a proxy", switch=True),
    Flag("--api-server-count", "use --ingresses N", ("1",)),
    Flag("--renderer-num-workers --tokenizer-pool-size", "use --tokenizers N"),
    Flag("--max-num-queued-reqs", "use --max-num-queued-requests N"),
    Flag("--shutdown-timeout", "use --drain-timeout-s N"),
    Flag("--log-config-file --logging-config", "use --log-format and --log-level"),
    Flag("--enable-force-include-usage", "clients ask with stream_options.include_usage", switch=True),
    Flag("--return-tokens-as-token-ids", "clients ask with return_tokens_as_token_ids", switch=True),
    Flag("--structured-outputs-config --reasoning-config", "see --structured-output-timeout-s and --reasoning-parser"),
    Flag("--logits-processors --tool-parser-plugin --scheduler-cls --worker-cls", "no code of others runs in here"),
    Flag("--tool-server", "the server calls no tools: clients do"),
    Flag("--profiler-config", "use --span-dir, or `pagebus bench profile`"),
    Flag("--default-chat-template-kwargs", "clients send chat_template_kwargs; or give a --chat-template"),
    Flag("--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --allowed-local-media-path", NO_MEDIA),
)
"""That ask, with most values, for what cannot be had, or had by another name."""
FLAGS = {name: flag for flag in TAKEN + REFUSED for name in flag.names.split()}


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` know them, though its help does not show them."""
    for name, flag in FLAGS.items():
        nargs = 0 if flag.switch else "+" if name == "--lora-modules" else None
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(name, action=_Foreign, nargs=nargs, dest="_", **hidden)  # type: ignore[arg-type]


class _Foreign(argparse.Action):
    """A note on standard error, or the end of the command."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: str | Sequence[Any] | None, option: str | None = None
    ) -> None:
        flag = FLAGS[option or ""]
        if not flag.takes(str(values)):
            parser.exit(2, f"pagebus: {option}: {flag.text}\n")
        if flag.taken == ANY:
            print(f"pagebus: {option} changes nothing: {flag.text}", file=sys.stderr)


def is_foreign(name: str, value: Any) -> bool:
    """Whether an argument of ``LLM`` is one of them that changes nothing.

    Raises:
        TypeError: it is one of them that cannot be had.
    """
    words = name.replace("_", "-")
    flag = FLAGS.get(f"--{words}")
    if flag is None:
        return False
    if value is False and (off := FLAGS.get(f"--no-{words}")) is not None and off.taken != ANY:
        raise TypeError(f"{name}: {off.text}")
    if value not in (None, False) and not flag.takes(str(value)):
        raise TypeError(f"{name}: {flag.text}")
    return True
