"""Flags of ``vllm serve`` for which there is no setting here, a row each: what becomes of them, and why."""

from __future__ import annotations

from dataclasses import dataclass

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


def _same(names: str, text: str) -> Flag:
    """A switch that asks for how it is anyway."""
    return Flag(names, text, ANY, switch=True)


ALIASES = {
    "--api-server-count": "ingresses",
    "-asc": "ingresses",
    "--data-parallel-size": "executors",
    "-dp": "executors",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-ep": "enable_expert_parallel",
    "-q": "quantization",
    "--max-num-queued-reqs": "max_num_queued_requests",
    "--renderer-num-workers": "tokenizers",
    "--shutdown-timeout": "drain_timeout_s",
    "--device-memory-utilization": "gpu_memory_utilization",
    "--num-speculative-tokens": "spec_tokens",
    "--speculative-model": "spec_model",
}
"""vLLM's names of settings that have another name here."""
SWITCHES = ("enable_expert_parallel",)
"""Settings among them whose names take no value."""
SHARDS = "ranks divide heads, widths, experts and the vocabulary, stages divide layers (docs/scale.md)"
MORE_GPUS = f"{SHARDS}; more GPUs serve more requests with --executors"
EXPERTS = f"experts stay where --enable-expert-parallel puts them, and {SHARDS}"
ADAPTERS = "adapters are of the linear layers of text models (docs/lora.md)"
GRAPHS = "see --enforce-eager, --max-cudagraph-capture-size and `pagebus compile-kernels`"
PROXY = "put a proxy in front"
NO_MEDIA = "models here read text only"
MACHINES = "start `pagebus actor KIND --bus redis://...` on each machine"
SPECULATION = (
    "drafts come from lookup, an EAGLE-3 head, MTP layers or a small model: method ngram, eagle3, mtp or draft_model, "
    "model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min"
)
CONFIG = "change config.json in a copy of the model's folder (rope types: default, linear, llama3)"
ATTENTION_ONLY = "models here have attention layers only"
NO_GROUPS = "waits between ranks end after 20 s, executors exchange nothing"
KERNELS = "kernels are Pagebus's own, see --attention-backend"
READING = "weights are read in order, in pieces, beside the start"
OBSERVED = "see /metrics and --span-dir"
NO_WATERMARK = "texts are not watermarked"
TAKEN = (
    _same("--trust-remote-code", "code of a model's repository is never run"),
    Flag("--code-revision", "code of a model's repository is never run", ANY),
    _same("--enable-chunked-prefill", "prompts are always read in chunks (--max-num-batched-tokens)"),
    _same("--async-scheduling", "steps are always planned ahead (--pipeline-depth)"),
    _same("--disable-log-requests", "requests are logged only with --enable-log-requests"),
    _same("--disable-log-stats --aggregate-engine-logging", "no statistics are logged; they are at /metrics"),
    _same("--disable-uvicorn-access-log", "answers are logged only with --enable-log-requests"),
    Flag("--uvicorn-log-level", "--log-level says what is logged", ANY),
    _same("--enable-log-deltas --no-enable-log-deltas", "outputs are logged as a whole, when they end"),
    _same("--enable-server-load-tracking", "/load always answers"),
    _same("--enable-prompt-tokens-details", "usage always tells cached tokens"),
    _same("--enable-request-id-headers", "every answer has X-Request-Id"),
    _same("--enable-scale-out", "/render, /derender and /inference/v1/generate are always there"),
    _same("--enable-offline-docs", "/docs asks nobody else for anything"),
    _same("--enable-ep-weight-filter", "ranks read only the experts that they have"),
    _same("--enable-sleep-mode", "/sleep and /wake_up are always there, for the operator"),
    _same("--enable-cumem-allocator --enable-nccl-comm-suspend", "an executor that sleeps gives all memory back"),
    Flag("--sleep-mode-backend", "an executor that sleeps gives all memory back", ANY),
    _same("--sleep-mode-offload-cudagraph", "an executor that sleeps gives all memory back"),
    _same("--enable-fault-tolerance", "losses always mend themselves (docs/recovery.md)"),
    _same("--disable-nccl-for-dp-synchronization", NO_GROUPS),
    Flag("--distributed-timeout-seconds --cpu-distributed-timeout-seconds --dp-sync-interval", NO_GROUPS, ANY),
    Flag("--collect-detailed-traces", "a trace always has all hops", ANY),
    Flag("--prefix-caching-hash-algo", "blocks are hashed by keyed BLAKE2b", ANY),
    _same("--language-model-only --skip-mm-profiling --disable-chunked-mm-input", NO_MEDIA),
    Flag("--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb", NO_MEDIA, ANY),
    Flag("--mm-hasher-algorithm --mm-tensor-ipc --mm-ipc-gpu-memory-gb --mm-processor-device", NO_MEDIA, ANY),
    _same("--enable-reasoning", "--reasoning-parser is enough"),
    _same("--enable-shm-tensor-arena", "actors speak over the bus"),
    _same("--disable-cascade-attn", "there is no cascade attention"),
    _same("--enable-flashinfer-autotune --monokernel", KERNELS),
    _same("--scheduler-reserve-full-isl", "a request begins where its prompt has room"),
    _same("--enable-flash-late-interaction", "no model here scores by late interaction"),
    _same("--allow-deprecated-quantization", "no format is deprecated here (--quantization)"),
    _same("--use-tqdm-on-load", "progress is shown on terminals, and logged elsewhere"),
    _same("--use-fp64-gumbel", "noise depends on the seed and the token's index, in float32"),
    _same("--jit-monitor-verbose", "kernels that are compiled late are always logged"),
    Flag("--jit-monitor-mode", "kernels that are compiled late are always logged", ANY),
    Flag("--safetensors-load-strategy --safetensors-prefetch-num-threads", READING, ANY),
    Flag("--safetensors-prefetch-block-size --max-parallel-loading-workers", READING, ANY),
    Flag("--pt-load-map-location --ignore-patterns", "only safetensors are fetched and read", ANY),
    Flag("--show-hidden-metrics-for-version", "no metric is hidden", ANY),
    Flag("--anthropic-disabled-thinking-effort", "thinking that is disabled is told to the chat template", ANY),
    Flag("--cohere-format", "there are no routes of Cohere's", ANY),
    _same("--cohere-is-reasoning-model", "there are no routes of Cohere's"),
    Flag("--task --runner", "a server generates and embeds alike", ("auto", "generate", "embed", "pooling")),
    Flag("--convert", "a server generates and embeds alike", ("auto", "embed", "none")),
    Flag("--distributed-executor-backend", "executors are processes (--executors)", ("mp", "uni")),
    Flag("--data-parallel-backend -dpb", "executors are processes (--executors)", ("mp",)),
    Flag("--guided-decoding-backend", "outputs are structured by llguidance", ("auto", "guidance", "xgrammar")),
    Flag("--chat-template-content-format", "templates get contents as text", ("auto", "string")),
    Flag("--tokenizer-mode --config-format --model-impl", "only the usual one is supported", ("auto", "hf", "vllm")),
    Flag("--response-role", "answers are the assistant's", ("assistant",)),
    Flag("--performance-mode", "see --max-num-seqs, --max-num-batched-tokens and --itl-target-ms", ("balanced",)),
    Flag("--logprobs-mode", "log probabilities are those before sampling parameters", ("raw_logprobs",)),
    Flag("--fingerprint-mode", "answers have no system fingerprint", ("none",)),
    Flag("--expert-placement-strategy", "each rank has experts that follow each other", ("linear",)),
    Flag("--moe-backend --linear-backend --sparse-indexer-topk-backend", KERNELS, ("auto",)),
    Flag("--tool-strict-level", "tools say `strict` themselves", ("auto",)),
    Flag("--watermark", "blocks are given out to the last; who has none gives way", ("0", "0.0")),
    Flag("--prefill-schedule-interval", "prompts are read in every step, see --itl-target-ms", ("1",)),
)
"""That ask, at least with some values, for how things are anyway."""
REFUSED = (
    Flag("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp", MORE_GPUS, ("1",)),
    Flag("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", SHARDS),
    Flag("--dcp-q-replicate --enable-hc-sp --enable-batch-sharded-sampling", SHARDS, switch=True),
    Flag("--enable-dbo --enable-elastic-ep --enable-eplb", EXPERTS, switch=True),
    Flag("--all2all-backend --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold", EXPERTS),
    Flag("--elastic-ep-max-dp-size --eplb-config", EXPERTS),
    Flag("--enable-return-routed-experts", "answers do not say which experts computed a token", switch=True),
    Flag("--data-parallel-size-local -dpl --data-parallel-address -dpa --data-parallel-rank -dpn", MACHINES),
    Flag("--data-parallel-rpc-port -dpp --data-parallel-start-rank -dpr", MACHINES),
    Flag(
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm",
        MACHINES,
        switch=True,
    ),
    Flag("--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s", MACHINES),
    Flag("--dp-supervisor-probe-failure-threshold --data-parallel-supervisor-port", MACHINES),
    Flag("--nnodes -n --node-rank -r --master-addr --master-port", MACHINES),
    Flag("--headless", MACHINES, switch=True),
    Flag("--device-ids", "set CUDA_VISIBLE_DEVICES; with --gpu-lock-dir executors take free GPUs by themselves"),
    Flag("--ray-workers-use-nsight", "profile with --span-dir, or `pagebus bench profile`", switch=True),
    Flag("--numa-bind", "start it under numactl", switch=True),
    Flag("--numa-bind-nodes --numa-bind-cpus", "start it under numactl"),
    Flag("--quantization-config", "change quantization_config in a copy of the model's folder, or see --quantization"),
    Flag("--kv-cache-dtype-skip-layers", "--kv-cache-dtype holds for all layers"),
    Flag("--lora-dtype", "adapters are computed in the model's number format", ("auto",)),
    Flag("--default-mm-loras --max-lora-cls-labels", ADAPTERS),
    Flag("--fully-sharded-loras", "ranks divide one matrix of each pair (docs/lora.md)", switch=True),
    Flag("--enable-tower-connector-lora --specialize-active-lora", ADAPTERS, switch=True),
    Flag("--enable-mixed-moe-lora-format --enable-moe-shared-loras", ADAPTERS, switch=True),
    Flag("--speculative-config -sc", SPECULATION),
    Flag("--per-request-spec-decode-metrics", "vllm:spec_decode_* at /metrics are by executor", switch=True),
    Flag("--hf-overrides", CONFIG),
    Flag("--rope-scaling --rope-theta --hf-config-path", CONFIG),
    Flag("--model-class-overrides", "models are told by `architectures` in their config.json"),
    Flag("--override-generation-config", "change generation_config.json in a copy of the model's folder"),
    Flag("--compilation-config -cc --cudagraph-capture-sizes --cuda-graph-sizes --optimization-level -O", GRAPHS),
    Flag("--max-seq-len-to-capture", GRAPHS),
    Flag("--attention-config -ac", "use --attention-backend"),
    Flag("--kernel-config --ir-op-priority", KERNELS),
    Flag("--mamba-backend --mamba-ssu-algorithm --mamba-cache-dtype --mamba-ssm-cache-dtype", ATTENTION_ONLY),
    Flag("--mamba-block-size --mamba-cache-mode --mamba-cache-philox-rounds --replayssm-buffer-len", ATTENTION_ONLY),
    Flag("--enable-mamba-cache-stochastic-rounding --use-replayssm", ATTENTION_ONLY, switch=True),
    Flag("--enable-mamba-shared-prefix-checkpoint", ATTENTION_ONLY, switch=True),
    Flag("--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend", ATTENTION_ONLY),
    Flag("--engram-config --diffusion-config -dc", ATTENTION_ONLY),
    Flag("--disable-sliding-window", "use --max-model-len with the window's length", switch=True),
    Flag("--swa-bounded-replay --kv-sharing-fast-prefill", "no model here shares or drops keys of layers", switch=True),
    Flag("--prefix-match-unit --prefix-cache-retention-interval", "prefixes are found by whole blocks (--block-size)"),
    Flag(
        "--no-enable-chunked-prefill",
        "prompts are always read in chunks, of at most --max-num-batched-tokens",
        switch=True,
    ),
    Flag("--no-async-scheduling", "use --pipeline-depth 1", switch=True),
    Flag("--long-prefill-token-threshold", "use --itl-target-ms, which limits prompts beside streams", ("0",)),
    Flag(
        "--long-prefill-token-threshold-adaptive", "use --itl-target-ms, which limits prompts beside streams",
        switch=True,
    ),
    Flag("--max-num-active-seqs", "use --max-num-seqs"),
    Flag("--cpu-offload-gb", "weights stay on the GPU; --swap-space is host memory for the cache", ("0",)),
    Flag("--cpu-offload-params --offload-params --offload-backend --offload-group-size", "weights stay on the GPU"),
    Flag("--offload-num-in-group --offload-prefetch-step", "weights stay on the GPU"),
    Flag("--sleep-preserve-parameter-names", "an executor that sleeps gives all memory back"),
    Flag("--kv-offloading-size", "use --swap-space N, host memory for the cache in GiB"),
    Flag("--kv-offloading-backend", "--swap-space is host memory for the cache", ("native",)),
    Flag("--kv-transfer-config --kv-events-config --ec-transfer-config", "use --kv-moves, --roles"),
    Flag("--ec-manager-config", NO_MEDIA),
    Flag("--weight-transfer-config", "weights are read from files: put them there, /sleep, /wake_up"),
    Flag("--download-dir", "set HF_HUB_CACHE"),
    Flag("--hf-token", "set HF_TOKEN"),
    Flag("--tokenizer-revision", "give the tokenizer as a folder (--tokenizer)"),
    Flag("--model-loader-extra-config", "weights are safetensors in a folder, or from the hub"),
    Flag("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --middleware", PROXY),
    Flag("--enable-ssl-refresh", PROXY, switch=True),
    Flag("--h11-max-incomplete-event-size --h11-max-header-count", "limits of heads are fixed (docs/security.md)"),
    Flag("--grpc", "there is HTTP only, and the bus itself (docs/jobs.md)", switch=True),
    Flag("--grpc-port", "there is HTTP only, and the bus itself (docs/jobs.md)"),
    Flag("--allowed-methods --allowed-headers", "--allowed-origins is enough: the API's own are allowed"),
    Flag("--allow-credentials", "pages send keys as a header; cookies are not used", switch=True),
    Flag("--disable-fastapi-docs", "/docs is one page; hide it by a proxy", switch=True),
    Flag("--tokenizer-pool-size", "use --tokenizers N"),
    Flag("--log-config-file --logging-config", "use --log-format and --log-level"),
    Flag("--log-error-stack", "what goes wrong inside is logged with its stack, and clients are told nothing of it",
         switch=True),
    Flag("--return-tokens-as-token-ids", "clients ask with return_tokens_as_token_ids", switch=True),
    Flag("--structured-outputs-config", "see --structured-output-timeout-s and --reasoning-parser"),
    Flag("--reasoning-config --reasoning-effort-map", "see --reasoning-parser; efforts reach the template as they are"),
    Flag("--logits-processors --tool-parser-plugin --reasoning-parser-plugin --scheduler-cls --worker-cls",
         "no code of others runs in here"),
    Flag("--worker-extension-cls --io-processor-plugin", "no code of others runs in here"),
    Flag("--tool-server", "the server calls no tools: clients do"),
    Flag("--exclude-tools-when-tool-choice-none", "clients leave tools out", switch=True),
    Flag("--profiler-config", "use --span-dir, or `pagebus bench profile`"),
    Flag("--enable-layerwise-nvtx-tracing", "use --span-dir, or `pagebus bench profile`", switch=True),
    Flag("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details", OBSERVED,
         switch=True),
    Flag("--kv-cache-metrics-sample --custom-histogram-buckets", OBSERVED),
    Flag("--watchdog-config --fault-tolerance-config", "use --step-timeout-s and --lease-ttl-s"),
    Flag("--fail-on-environ-validation", "a PAGEBUS_ variable that is no setting always ends the start", switch=True),
    Flag("--enable-trace-replay", "`pagebus record` and `pagebus simulate` replay traffic", switch=True),
    Flag("--return-sampling-mask", "answers do not tell which tokens a sampler left over", switch=True),
    Flag("--aux-output-config --additional-config", "there is nothing that it could be for"),
    Flag("--fingerprint-value", "answers have no system fingerprint"),
    Flag("--pooler-config", "use --pooling-type"),
    Flag("--watermark-config", NO_WATERMARK),
    Flag("--default-chat-template-kwargs", "clients send chat_template_kwargs; or give a --chat-template"),
    Flag("--enable-prompt-embeds", "prompts are texts or token ids", switch=True),
    Flag("--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --allowed-local-media-path", NO_MEDIA),
    Flag("--allowed-media-domains --video-pruning-rate --video-pruning-method", NO_MEDIA),
    Flag("--enable-mm-embeds --mm-encoder-only --interleave-mm-strings --trust-request-mm-kwargs", NO_MEDIA,
         switch=True),
    Flag("--mm-device-do-normalize", NO_MEDIA, switch=True),
    Flag("--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype", NO_MEDIA),
    Flag("--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin", NO_MEDIA),
)  # fmt: skip
"""That ask, with most values, for what cannot be had, or had by another name."""
FLAGS = {name: flag for flag in TAKEN + REFUSED for name in flag.names.split()}
