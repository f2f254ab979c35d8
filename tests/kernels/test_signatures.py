"""Every function of the kernels has types, but those that are compiled for a device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pagebus.kernels

FILES = sorted(Path(pagebus.kernels.__file__).parent.rglob("*.py"))
COMPILED = ("triton.jit", "gluon.jit")


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon reads the function, and no Python."""
    return any(ast.unparse(each).startswith(COMPILED) for each in function.decorator_list)


def untyped(source: str) -> list[str]:
    """Functions without a result's type, or with a parameter without one. ``self`` and ``cls`` need none."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not is_compiled(node):
            given = node.args
            words = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            bare = [word.arg for word in words if word.annotation is None and word.arg not in ("self", "cls")]
            if bare or node.returns is None:
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_runs_on_the_host_has_types(path: Path) -> None:
    """mypy lets functions without types pass here, for the sake of those that are compiled."""
    assert untyped(path.read_text()) == []


def test_a_missing_type_is_found() -> None:
    """A kernel needs none."""
    good = "@triton.jit\ndef kernel(x): ...\ndef good(x: int) -> int: ...\n"
    assert untyped(good) == []
    assert untyped(good + "def bare(x) -> int: ...\ndef silent(x: int): ...") == ["bare", "silent"]
