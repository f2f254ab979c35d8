"""What four-bit codes and small scales mean."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Floats of a sign, two bits of exponent and one of mantissa."""
SMALLEST = 1 << 22
"""The bits of 2 ** -127, which is below float32's normal numbers."""


def exponents(codes: torch.Tensor) -> torch.Tensor:
    """E8M0 (uint8) -> float32 2 ** (code - 127), exact; 255 is not a number."""
    bits = torch.where(codes == 0, SMALLEST, codes.to(torch.int32) << 23)
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32))
