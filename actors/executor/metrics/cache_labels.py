"""Labels of the cache for dashboards that were made for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagebus.actors.settings import Settings

if TYPE_CHECKING:  # torch is imported while other things happen
    from pagebus.actors.executor.loading.loaded import EngineInfo


def cache_labels(settings: Settings, info: EngineInfo) -> dict[str, str]:
    """Labels of ``vllm:cache_config_info``; "None" for what does not exist here."""
    return {
        "cache_dtype": info.kv_cache_dtype,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "gpu_memory_utilization": str(settings.gpu_memory_utilization),
        "enable_prefix_caching": str(settings.enable_prefix_caching),
        "num_cpu_blocks": str(info.num_host_blocks),
        "kv_cache_size_tokens": str(info.num_blocks // (1 + info.windowed_pages) * info.block_size),
        "user_specified_block_size": str(settings.block_size != Settings().block_size),
        "num_gpu_blocks_override": str(settings.num_gpu_blocks_override),
        "kv_cache_memory_bytes": str(settings.kv_cache_memory_bytes),
        "kv_offloading_size": str(settings.swap_space),
        "prefix_caching_hash_algo": "blake2b",
        "is_attention_free": "False",
        "sliding_window": str(info.windowed_tokens or info.window or None),
    }
