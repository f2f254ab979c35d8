"""Makes the keys of compiled kernels in Triton's cache independent of the order in which kernels are launched.

A kernel's key contains the constants that it and the functions it calls read from their modules. Triton takes over
those of a function only if that function's own key is known by then (3.6 and 3.7), so the key would depend on which
kernels were launched before. Whatever was compiled ahead would be compiled again at a start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


def settle_keys(functions: Iterable[Any] | None = None) -> None:
    """Compute the keys of all compiled functions that were imported, each behind those of the functions it calls."""
    settled: set[int] = set()
    for function in compiled_functions() if functions is None else functions:
        _settle(function, settled)


def compiled_functions() -> Iterator[Any]:
    """What Triton or Gluon compiles, of all modules of kernels that were imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pagebus.kernels."):
            yield from filter(_is_compiled, list(vars(module).values()))  # other threads may import meanwhile


def _settle(function: Any, settled: set[int]) -> None:
    if id(function) in settled:
        return
    settled.add(id(function))
    called = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
    for each in filter(_is_compiled, called):
        _settle(each, settled)
    _ = function.cache_key


def _is_compiled(value: Any) -> bool:
    """Not so in Triton's interpreter, nor without Triton."""
    return type(value).__name__.endswith("JITFunction")
