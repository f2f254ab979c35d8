"""What sources of kernels must have: types of what runs on the host, and places of rows in 64 bits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    for node in functions_of(source):
        if not is_compiled(node):
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


ROWS = ("row", "token", "pair")


def narrow_rows(source: str) -> list[str]:
    """Products of a program's number, as a row, with a stride, both of 32 bits."""
    found = []
    for kernel in filter(is_compiled, functions_of(source)):
        narrow = {target for target, value in assigned(kernel) if target in ROWS and value.startswith("tl.program_id")
                  and "int64" not in value}  # fmt: skip
        for node in ast.walk(kernel):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                left, right = sorted((ast.unparse(node.left), ast.unparse(node.right)), key=lambda text: text in narrow)
                if right in narrow and left.startswith("stride_"):
                    found.append(f"{kernel.name}: {ast.unparse(node)}")
    return found


def functions_of(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Names and what they are set to, one by one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(map(ast.unparse, target.elts), map(ast.unparse, value.elts), strict=True)
            else:
                yield ast.unparse(target), ast.unparse(value)


def test_rows_may_begin_far_behind_the_first() -> None:
    """Logits of 8192 sequences and 262 208 tokens have more than 2^31 elements."""
    assert [found for path in FILES for found in narrow_rows(path.read_text())] == []


def test_a_narrow_row_is_found() -> None:
    """Also where several are set at once."""
    good = "@triton.jit\ndef kernel(x, stride_x):\n    row, tile = {}, tl.program_id(1)\n    x += row * stride_x"
    assert narrow_rows(good.format("tl.program_id(0).to(tl.int64)")) == []
    assert narrow_rows(good.format("tl.program_id(0)")) == ["kernel: row * stride_x"]
