"""A product that is rounded before anything is added to it."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton


@triton.jit
def rounded_product(x, y, NATIVE: tl.constexpr):
    """x * y in float32, of one shape after broadcasting. A GPU's compiler fuses products with sums behind them, and
    does not round in between; an instruction that names its rounding stays alone."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return x * y
