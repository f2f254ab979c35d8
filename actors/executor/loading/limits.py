"""What follows from settings and model before anything is loaded: how large steps, graphs and the cache may be."""

from __future__ import annotations

import torch

from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.device import resolve_kv_dtype, resolve_token_budget
from pagebus.actors.executor.loading.head_weights import DraftFiles
from pagebus.actors.executor.memory.budget import KvDemand
from pagebus.actors.executor.memory.kv_cache import CacheFormat
from pagebus.actors.executor.pooling.full_attention import takes_any_lengths
from pagebus.actors.model.config import ModelConfig, effective_max_model_len, num_layer_weights, planned_model_len
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.speculation import speculation

LAUNCH_FLOPS = 15_000_000_000_000
"""Products of a step that take the device about as long as a busy host takes to launch all kernels: 23 ms of an H200.
(A step of llama8b with 512 tokens computes for 13 ms, and was launched in 15 beside the other actors; one of 1024 takes
21 to 24 ms either way.) A larger step gains nothing from a graph, and would be padded."""
MAX_GRAPH_TOKENS = 4096
MAX_ENCODER_GRAPH_TOKENS = 512
"""In a graph, attention of an encoder has programs for rows as long as the graph, whatever the rows are: many more than
it needs, of large ones."""


def cache_dtype(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The cache's number format; of a model that caches nothing its own."""
    return dtype if config.in_one_step else resolve_kv_dtype(settings, dtype)


def cache_format(settings: Settings, config: ModelConfig, dtype: torch.dtype, head: DraftFiles | None) -> CacheFormat:
    """What lies in a block of the cache; of a draft head in the model's own format."""
    kv_dtype = cache_dtype(settings, config, dtype)
    return CacheFormat(config, settings.block_size, kv_dtype, None if head is None else head.cached, dtype)


def batch_limits(settings: Settings, config: ModelConfig, device: torch.device, num_blocks: int) -> BatchLimits:
    """The limits that follow from settings and model."""
    budget = resolve_token_budget(settings, device)
    if config.in_one_step:  # the longest prompt has to fit; where the setting says less, it is no longer than that
        budget = max(budget, effective_max_model_len(settings, config))
    groups = config.cache_groups
    return BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=planned_model_len(settings, config),
        max_num_batched_tokens=budget,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        vocab_size=config.vocab_size,
        window=config.kept_window,
        windowed_pages=groups.windowed_pages,
        windowed_tokens=groups.windowed_tokens,
        num_drafts=num_drafts(settings, config),
    )


def num_drafts(settings: Settings, config: ModelConfig) -> int:
    """The most drafts of a row; by default none of a model that only pools, which samples nothing. Without a
    number, MTP guesses one token with each of its layers.

    Raises:
        SettingsError: the settings ask for drafts of such a model.
    """
    wanted = speculation(settings)
    if config.stage is not None:
        return 0
    if config.pooler is None:
        return wanted.tokens or (config.num_mtp_layers if wanted.method == "mtp" else 0)
    if settings.spec_method is not None and wanted.method != "none":
        raise SettingsError(f"--spec-method {wanted.method}: this model samples no tokens")
    return 0


def demand_of(limits: BatchLimits, block_bytes: int) -> KvDemand:
    """What a cache of such blocks must hold."""
    most_tokens = limits.max_num_batched_tokens
    return KvDemand(
        block_bytes, limits.block_size, limits.max_model_len, limits.windowed_tokens or limits.window, most_tokens,
        limits.windowed_pages,
    )  # fmt: skip


def decodes_apart(settings: Settings, config: ModelConfig) -> bool:
    """Whether rows of one token have kernels of their own: not where results depend on no other row, nor of an encoder,
    for which they are prompts as all others."""
    return not settings.deterministic and not config.in_one_step


def graph_tokens(settings: Settings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """The most tokens of a step that runs from a CUDA graph, 0 for none."""
    if device.type == "cpu" or settings.enforce_eager:
        return 0
    if config.in_one_step and not takes_any_lengths(dtype, config.head_dim):
        return 0
    if settings.max_cudagraph_capture_size is not None:
        return settings.max_cudagraph_capture_size
    if config.in_one_step:
        return min(MAX_ENCODER_GRAPH_TOKENS, _hidden_by_computing(config))
    return max(settings.max_num_seqs, min(MAX_GRAPH_TOKENS, _hidden_by_computing(config)))


def pieces_tokens(settings: Settings, config: ModelConfig, device: torch.device) -> int:
    """The most tokens of a step that runs from graphs of its pieces, 0 for none: a norm apart from the sum before it
    may round otherwise, so ``deterministic`` outputs have none."""
    limited = config.in_one_step or settings.enforce_eager or settings.max_cudagraph_capture_size is not None
    return 0 if device.type == "cpu" or limited or settings.deterministic else _hidden_by_computing(config)


def agreed_pieces(settings: Settings, config: ModelConfig, device: torch.device, row_bytes: int, comm: Comm) -> int:
    """:func:`pieces_tokens` of all ranks, whose sums of rows of ``row_bytes`` may be captured."""
    most_bytes = min(pieces_tokens(settings, config, device) * row_bytes, comm.captured_bytes)
    return int(comm.least(most_bytes // row_bytes))


def _hidden_by_computing(config: ModelConfig) -> int:
    """Tokens of a step that computes for as long as it takes to launch."""
    return LAUNCH_FLOPS // (2 * num_layer_weights(config))
