"""Settings of the KV cache's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.declaring import setting


def _check_block_size(value: Any) -> str | None:
    return None if value % 16 == 0 else "must be a multiple of 16"


def _check_fraction(value: Any) -> str | None:
    return None if 0 < value <= 1 else "must be more than 0 and at most 1"


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How much memory the key-value cache takes."""

    block_size: int = setting(16, help="tokens in one block of the cache", low=16, high=1024, check=_check_block_size)
    kv_cache_dtype: str = setting(
        "auto",
        help="number format of the cache (auto: the model's); int8, the more exact, and fp8, which is fp8_e4m3, hold "
        "twice as many tokens",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"),
    )
    calculate_kv_scales: bool = setting(
        True, help="find an fp8 cache's scales at start where the checkpoint has none (else they are 1)"
    )
    gpu_memory_utilization: float = setting(
        0.9, help="share of the GPU's memory that may be used", check=_check_fraction
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        help="number of blocks of the cache, or pages if only some layers have a window, in place of the measured one",
        low=1,
        high=2**30,
    )
    kv_cache_memory_bytes: int | None = setting(
        None, help="bytes for the cache, instead of a share of the GPU", low=1, high=2**50
    )
    cpu_kv_cache_gib: float = setting(1.0, help="GiB for the cache when the device is the CPU", low=0.001, high=4096)
    swap_space: float = setting(
        4.0,
        help="GiB of host memory per executor for blocks that do not fit on the device; 0: none",
        low=0,
        high=65536,
    )
    disk_cache_dir: str | None = setting(
        None, help="folder on a local disk in which blocks of prompts outlive restarts; below the host tier"
    )
    disk_cache_gib: float = setting(
        64.0, help="GiB per executor that --disk-cache-dir may take", low=0.001, high=1048576
    )
    preemption_mode: str = setting(
        "auto",
        help="blocks of a preempted sequence are copied to the host (swap), computed again (recompute), or whichever "
        "is faster by measured rates (auto)",
        choices=("auto", "swap", "recompute"),
    )
    disable_hybrid_kv_cache_manager: bool = setting(
        False, help="keep all blocks of models in which only some layers have a sliding window"
    )
    enable_prefix_caching: bool = setting(True, help="reuse the blocks of prompts that begin alike")
    kv_moves: str = setting(
        "host",
        help="blocks of the cache that executors copy from each other: between those of one host (host), also over "
        "TCP, unencrypted, to hosts that know the deployment's Redis (network), also through NVIDIA's NIXL (nixl), or "
        "not at all (off)",
        choices=("host", "network", "nixl", "off"),
    )
