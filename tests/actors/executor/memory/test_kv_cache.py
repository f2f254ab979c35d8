"""Sizes and layout of the cache."""

from __future__ import annotations

import pytest
import torch

from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache, blocks_needed, kv_block_bytes, layer_pages
from pagebus.actors.model.config import SHIPPED_MODEL, ModelConfig
from pagebus.kernels.common.int8 import check_scales

CONFIG = ModelConfig.load(SHIPPED_MODEL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_allocates_what_it_counts(dtype: torch.dtype) -> None:
    """The cache is zeros in the promised layout and takes num_blocks times kv_block_bytes."""
    cache = allocate_kv_cache(CONFIG, 5, 32, dtype, torch.device("cpu"))

    assert tuple(cache.shape) == (5, CONFIG.num_layers, 2, 32, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert cache.dtype == dtype
    assert cache.is_contiguous()
    assert cache.nbytes == 5 * kv_block_bytes(CONFIG, 32, dtype)
    assert not cache.float().any()


def test_allocates_scales_behind_the_numbers_of_int8() -> None:
    """A block is one contiguous piece; each layer's pages are views of it, and so are their scales."""
    cache = allocate_kv_cache(CONFIG, 5, 32, torch.int8, torch.device("cpu"))

    assert cache.dtype == torch.int8
    assert cache.shape == (5, kv_block_bytes(CONFIG, 32, torch.int8))
    assert cache.is_contiguous()
    exact = kv_block_bytes(CONFIG, 32, torch.bfloat16)
    assert 2 * cache.shape[1] == exact * (1 + 2 / CONFIG.head_dim)
    for layer in range(CONFIG.num_layers):
        k_cache, v_cache, scales = layer_pages(cache, layer, CONFIG)
        assert scales is not None
        assert k_cache.shape == v_cache.shape == (5, 32, CONFIG.num_kv_heads, CONFIG.head_dim)
        assert scales.shape == (2, 5, 32, CONFIG.num_kv_heads)
        check_scales(k_cache, scales)
        k_cache[3], v_cache[3], scales[:, 3] = 1, 2, 1 + 2**-7
    assert bool((cache[3] != 0).all())
    assert not cache[[0, 1, 2, 4]].any()


def test_demand_is_in_whole_blocks() -> None:
    """A sequence that fills its last block in part needs all of it."""
    assert blocks_needed(max_num_seqs=4, max_model_len=33, block_size=16) == 12
