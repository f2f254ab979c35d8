"""The expert of all tokens, added to what their own experts gave."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.moe.shared import add_shared, add_shared_reference


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_shared(dtype: torch.dtype, gated: bool, device: torch.device) -> None:
    """Times the sigmoid of the last of the router's logits, which are wider rows; or as it is."""
    total, shared = (torch.randn(3, 1100, device=device).to(dtype) for _ in range(2))
    logits = 3 * torch.randn(3, 9, device=device)
    gate = logits[:, 8:] if gated else None
    factor = 1 / (1 + (-logits[:, 8:].double()).exp()) if gated else 1.0
    wanted = total.double() + shared.double() * factor
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    for add in (add_shared, add_shared_reference):
        given = total.clone()
        assert add(given, shared, gate) is given
        torch.testing.assert_close(given.double(), wanted, rtol=tolerance, atol=tolerance)


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error."""
    none = torch.empty(0, 16, device=device)
    assert add_shared(none, none, None).shape == (0, 16)
