"""Settings of the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.settings.declaring import setting


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How steps are computed."""

    device: str = setting("auto", help="device that runs the model", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        help="number format of weights and activations (auto: the model's own)",
        choices=("auto", "float32", "bfloat16", "float16", "float", "half"),
    )
    seed: int = setting(0, help="seed of dummy weights", low=0, high=2**63 - 1)
    max_model_len: int | None = setting(
        None, help="longest prompt plus output, tokens (default: the model's)", low=1, high=2**24
    )
    max_num_seqs: int = setting(256, help="most sequences in one step", low=1, high=8192)
    max_num_batched_tokens: int | None = setting(
        None, help="most tokens in one step (default: 8192 on CUDA, 2048 on CPU)", low=1, high=2**20
    )
    max_num_scheduled_tokens: int | None = setting(
        None, help="most tokens that the scheduler plans for one step (default: as many as fit)", low=1, high=2**20
    )
    enforce_eager: bool = setting(False, help="do not use CUDA graphs")
    disable_custom_all_reduce: bool = setting(
        False, help="ranks on GPUs exchange over NCCL alone, not by writing into each other's memory"
    )
    max_cudagraph_capture_size: int | None = setting(
        None,
        help="most tokens of a step that runs from CUDA graphs (default: steps that take longer to launch than to "
        "compute; above 4096 tokens attention is outside the graphs)",
        low=1,
        high=8192,
    )
    attention_backend: str = setting(
        "auto",
        help="attention on CUDA: Pagebus's own kernels (triton); these for decodes and torch's cuDNN attention for "
        "prompts where supported (torch); or the one measured to be faster for the shape (auto)",
        choices=("auto", "triton", "torch"),
    )
    deterministic: bool = setting(
        False,
        help="compute each token in the same way whatever else is in the batch, so that a request gives the same "
        "tokens alone, in a batch, from the prefix cache and when recomputed; slower, CUDA only",
    )
    pipeline_depth: int = setting(
        4, help="most step plans in flight per executor; more than two only while steps are short", low=1, high=8
    )
    spec_method: str | None = setting(
        None,
        help="how the next tokens of a sequence are guessed, to be verified several in a step (docs/speculation.md): "
        "ngram searches the sequence for its last tokens, eagle3 asks the head in --spec-model, "
        "draft_model the small model there, mtp the checkpoint's own layer for that, none guesses nothing (default: "
        "ngram, where the model allows it)",
        choices=("none", "ngram", "eagle3", "mtp", "draft_model"),
    )
    spec_model: str | None = setting(
        None,
        help="folder or hub id of the head that eagle3 asks (default: the folder eagle3 within the model's), or of the "
        "small model that draft_model asks",
    )
    spec_tokens: int | None = setting(
        None, help="most tokens guessed for a sequence and step (default: 4)", low=1, high=16
    )
    prompt_lookup_max: int | None = setting(
        None, help="most last tokens that ngram searches for (default: --prompt-lookup-min, or 5)", low=1, high=64
    )
    prompt_lookup_min: int | None = setting(
        None,
        help="fewest last tokens that ngram searches for (default: --prompt-lookup-max; else 5 with --spec-method, 3 "
        "without)",
        low=1,
        high=64,
    )
    draft_tensor_parallel_size: int | None = setting(
        None,
        help="ranks among which what guesses is divided: as many as the model (default: --tensor-parallel-size)",
        low=1,
        high=64,
    )
    enable_lora: bool = setting(False, help="serve adapters of the model (docs/lora.md)")
    lora_modules: tuple[str, ...] = setting(
        (), help='adapters to serve from the start: NAME=PATH, or {"name": ..., "path": ...}, each'
    )
    lora_resolver_cache_dir: str = setting("", help="folder whose folders are served as adapters, by their names")
    max_loras: int = setting(1, help="most adapters in one step", low=1, high=1024)
    max_lora_rank: int = setting(16, help="largest rank of an adapter", low=1, high=512)
    lora_target_modules: tuple[str, ...] = setting(
        (),
        help="modules that adapters may change, by the ends of their names (default: projections, but not of experts)",
    )
    max_cpu_loras: int | None = setting(
        None, help="adapters kept in an executor's host memory (default: --max-loras)", low=1, high=2**20
    )
    step_timeout_s: float = setting(
        300.0,
        help="seconds without a finished step, or for a copy of blocks, after which an executor is hung and ends",
        low=1,
        high=86400,
    )
    scheduling_policy: str = setting(
        "fcfs",
        help="fcfs: first come, first served; priority: by the priority number of the request, lower first",
        choices=("fcfs", "priority"),
    )
    priority_aging_s: float = setting(
        30.0, help="seconds of waiting that count as one step of priority", low=0.001, high=1e9
    )
    itl_target_ms: float | None = setting(
        None,
        help="target time of a step with running streams; limits how much of a long prompt is computed beside them",
        low=0.1,
        high=1e6,
    )
    ttft_target_ms: float | None = setting(
        None,
        help="time to the first token beyond which --itl-target-ms may be exceeded, up to twofold",
        low=0.1,
        high=1e9,
    )
    roles: str | None = setting(
        None,
        help="executors that compute long prompts, and those that go on with them, as prefill=1,decode=3: streams do "
        "not wait for prompts then; auto: as many as the load suggests (default: all do both)",
    )
    threads: int | None = setting(
        None, help="threads of an executor on the CPU (default: its share of the cores)", low=1, high=4096
    )
