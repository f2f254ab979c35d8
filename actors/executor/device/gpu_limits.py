"""Checks the kernels' limits on some kinds of GPU before anything is loaded. Imports no torch."""

from __future__ import annotations

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.kernels.common.target import Target, first_target

E4M3_CACHES, LEAST_OF_E4M3 = ("fp8", "fp8_e4m3"), 89
"""Compute capability (8.9) from which GPUs, and Triton for them, know this float8; e5m2 is half of a float16."""
LARGEST_HEAD = 256
"""The largest heads whose tiles fit into 99 KiB, of a cache in 16 bits: they take 69."""
MOST_RANKS = 8
"""Of a stage: :data:`pagebus.kernels.exchange.peers.SENDERS`, whose kernels are compiled also for ranks over NCCL."""


def check_first_gpu(settings: Settings) -> None:
    """:func:`check_gpu` for the machine's first GPU, as far as the settings decide; the driver has not been queried
    before.

    Raises:
        SettingsError: the GPU does not support these settings.
    """
    if settings.kv_cache_dtype in E4M3_CACHES:  # else the executor asks, beside others: the driver takes a while
        check_gpu(settings, None, first_target())


def check_ranks(settings: Settings) -> None:
    """What ranks cannot do yet on GPUs.

    Raises:
        SettingsError: it is asked for.
    """
    if settings.tensor_parallel_size > MOST_RANKS:
        raise SettingsError(
            f"--tensor-parallel-size {settings.tensor_parallel_size}: at most {MOST_RANKS} on GPUs; divide the model "
            "further with --pipeline-parallel-size"
        )


def check_gpu(settings: Settings, config: ModelConfig | None, target: Target | None) -> None:
    """Whether a ``target`` (None: a CPU) can do what is asked of it. Without a ``config``, as far as settings say.

    Raises:
        SettingsError: it cannot; the text names what to do instead.
    """
    if target is None or settings.device == "cpu":
        return
    check_ranks(settings)
    name = f"this GPU (sm_{target.capability})"
    if settings.kv_cache_dtype in E4M3_CACHES and target.capability < LEAST_OF_E4M3:
        raise SettingsError(
            f"--kv-cache-dtype {settings.kv_cache_dtype}: {name} does not know this format, which begins with "
            f"sm_{LEAST_OF_E4M3}; use --kv-cache-dtype int8, which takes as little memory and is more exact"
        )
    if config is None or config.head_dim <= LARGEST_HEAD or not target.small_memory:
        return
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    if config.latent is not None and dtype != "float32":
        raise SettingsError(
            f"the model's latents of {config.head_dim} numbers: {name} has too little shared memory for tiles of them "
            "in 16 bits; use a GPU with more (A100, H100, H200)"
        )
    if settings.kv_cache_dtype == "auto" and dtype != "float32":
        raise SettingsError(
            f"the model's heads of {config.head_dim}: {name} has too little shared memory for tiles of more than "
            f"{LARGEST_HEAD} in 16 bits; use --kv-cache-dtype int8, or a GPU with more (A100, H100, H200)"
        )
