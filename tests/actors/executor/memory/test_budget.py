"""What the cache must hold at least."""

from __future__ import annotations

import pytest
import torch

from pagebus.actors.executor.memory.budget import KvDemand, blocks_in
from pagebus.actors.settings import Settings, SettingsError

CPU = torch.device("cpu")


def blocks(num_blocks: int, **demand: int) -> int:
    """Of a cache of so many blocks of a kilobyte."""
    wanted = KvDemand(**{"block_bytes": 1024, "block_size": 16, "max_model_len": 4096, **demand})
    return blocks_in(num_blocks * 1024, wanted, Settings(), CPU, measured=False)


def test_one_sequence_has_to_fit() -> None:
    """With all its tokens."""
    assert blocks(256) == 256
    with pytest.raises(SettingsError, match="the largest --max-model-len that fits is 4080"):
        blocks(255)


def test_of_a_windowed_model_its_window_and_a_step_have_to_fit() -> None:
    """However long sequences get; and no more than all of a short one."""
    assert blocks(20, window=100, most_tokens=200) == 20
    with pytest.raises(SettingsError, match="does not hold one sequence of 4096 tokens"):
        blocks(19, window=100, most_tokens=200)
    assert blocks(4, window=100, most_tokens=200, max_model_len=64) == 4
