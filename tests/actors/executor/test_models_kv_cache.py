"""Sizes and layout of the cache."""

from __future__ import annotations

import pytest
import torch

from actors.executor.kv_cache import allocate_kv_cache, blocks_needed, blocks_that_fit, kv_block_bytes
from actors.model_config import SHIPPED_MODEL, ModelConfig

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


def test_counts_whole_blocks() -> None:
    """A block that does not fit as a whole does not count; demand is rounded up to whole blocks."""
    block = kv_block_bytes(CONFIG, 16, torch.float32)

    assert blocks_that_fit(3 * block - 1, CONFIG, 16, torch.float32) == 2
    assert blocks_that_fit(3 * block, CONFIG, 16, torch.float32) == 3
    assert blocks_needed(max_num_seqs=4, max_model_len=33, block_size=16) == 12
