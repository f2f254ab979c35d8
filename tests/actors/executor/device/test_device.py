"""Which device and format settings mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.actors.executor.device.device import check_attention, resolve_device, resolve_dtype, resolve_token_budget
from pagebus.actors.settings import Settings, SettingsError


def test_settings_decide_device_and_format() -> None:
    """``auto`` on a machine without CUDA is the CPU and float32."""
    device = resolve_device(Settings(device="cpu"))

    assert str(resolve_dtype(Settings(), "bfloat16", device)) == "torch.float32"
    assert str(resolve_dtype(Settings(dtype="half"), "bfloat16", device)) == "torch.float16"
    assert resolve_token_budget(Settings(), device) == 2048


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"attention_backend": "triton"}, "--attention-backend triton"), ({"deterministic": True}, "--deterministic")],
)
def test_attention_of_a_gpu_is_refused_on_a_cpu(settings: dict[str, Any], message: str) -> None:
    """What only CUDA can do names its flag; torch is what a CPU computes with anyway."""
    check_attention(Settings(attention_backend="torch"), torch.device("cpu"))
    check_attention(Settings(**settings), torch.device("cuda"))
    with pytest.raises(SettingsError, match=message):
        check_attention(Settings(**settings), torch.device("cpu"))
