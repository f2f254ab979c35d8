"""The keys of compiled kernels in Triton's cache are the same in every process."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from triton.language import constexpr

import pagebus.kernels

IN_TWO_ORDERS = """
import json, pkgutil
from importlib import import_module
import pagebus.kernels
from pagebus.kernels.common.cache_keys import compiled_functions, settle_keys

for each in pkgutil.walk_packages(pagebus.kernels.__path__, "pagebus.kernels."):
    import_module(each.name)
functions = list(dict.fromkeys(compiled_functions()))
keys = []
for order in (functions, functions[::-1]):
    for each in functions:
        each.hash, each.used_global_vals = None, {}
    settle_keys(order)
    keys.append([each.cache_key for each in functions])
print(json.dumps([len(functions), [each.__name__ for each, *both in zip(functions, *keys) if len({*both}) > 1]]))
"""
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


def test_keys_do_not_depend_on_what_was_launched_before() -> None:
    """All compiled functions, first to last and last to first."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", IN_TWO_ORDERS], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, different = json.loads(done.stdout)
    assert count > 100
    assert different == []
