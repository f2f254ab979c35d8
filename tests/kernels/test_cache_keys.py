"""The keys of compiled kernels in Triton's cache are the same in every process."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from triton.language import constexpr

import pagebus.kernels

MODULES = [import_module(each.name) for each in pkgutil.walk_packages(pagebus.kernels.__path__, "pagebus.kernels.")]


def ambiguous(modules: Iterable[Any]) -> list[str]:
    """Constants of kernels that have different values in different modules.

    Triton puts constants into a kernel's key sorted by their names and then by the addresses of their modules, which
    differ from process to process: a kernel that reads two of one name may be compiled again by each process.
    """
    values = defaultdict(set)
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, constexpr):
                values[name].add(repr(value.value))
    return sorted(name for name, found in values.items() if len(found) > 1)


def test_a_constant_of_kernels_has_one_value() -> None:
    """Whatever is compiled ahead of a start is found by it."""
    assert ambiguous(MODULES) == []


def test_two_values_are_found() -> None:
    """Of one name; the same value twice does no harm."""
    one, two = SimpleNamespace(A=constexpr(1), B=constexpr(1)), SimpleNamespace(A=constexpr(2), B=constexpr(1))
    assert ambiguous([one, two]) == ["A"]
