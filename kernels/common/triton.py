"""`triton` and `tl`, `gluon` and `gl`, or stand-ins on platforms without Triton, where only the references can run."""

from __future__ import annotations

from functools import cache
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has no build for this platform

    class _Missing:
        """Lets kernels be defined (jit does nothing, constexpr holds its value) but not launched."""

        int32 = int64 = float32 = None

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else lambda wrapped: wrapped

    triton = tl = _Missing()

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton, or one before 3.4: nothing may be chosen that needs it
    TensorDescriptor = None

try:  # Triton itself imports this at the first launch of any kernel
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LayoutDescriptor
except ImportError:  # no Triton, or one before 3.6
    from types import SimpleNamespace

    gluon = gl = SimpleNamespace(
        jit=lambda function=None, **_: function or (lambda wrapped: wrapped),
        constexpr_function=lambda function: function,
    )
    hopper = mma_v2 = LayoutDescriptor = None

__all__ = [
    "LayoutDescriptor", "TensorDescriptor", "constant", "gl", "gluon", "hopper", "mma_v2",
    "next_power_of_2", "tl", "triton",
]  # fmt: skip


def constant(value: Any) -> Any:
    """``tl.constexpr(value)``, for what kernels read from their modules. At every launch Triton compares each such
    value, of the functions that a kernel calls too, with a copy of what it was. As its own copy it is found equal in a
    quarter of the time; a product has 26 of them."""
    return _constant_type()(value)


@cache
def _constant_type() -> Any:
    if not isinstance(tl.constexpr, type):
        return tl.constexpr
    alike = tl.constexpr(False)

    class Constant(tl.constexpr):  # type: ignore[misc]
        def __copy__(self) -> Constant:
            return self

        def __deepcopy__(self, memo: object) -> Constant:
            return self

        def __ne__(self, other: object) -> Any:
            return alike if other is self else super().__ne__(other)

    return Constant


def next_power_of_2(value: int) -> int:
    """The smallest power of two >= value (value >= 1)."""
    return 1 << (value - 1).bit_length()
