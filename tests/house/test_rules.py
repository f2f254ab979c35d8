"""The rules of the house, from the code's own imports and files."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.house.imports import NAME, PACKAGES, ROOT, Import, all_imports, all_modules, circles, nodes, sources, tree
from tests.house.room_map import ROW, idea, rooms, rows
from tests.house.rooms import FROM_ACTORS, IMPURE, PURE, ROOMS

MOST_LINES = 400
MOST_FUNCTION_LINES = 40
"""Without signature and docstring. Triton kernels are not counted: cut into functions, they would hand on dozens of
values."""
TABLES = {"actors/executor/device/ops.py: Ops.triton"}
"""Functions that are longer because they are a table, with a line for each of its entries."""
MOST_FILES = 15
"""Of one folder, its ``__init__.py`` not counted, which only says what the folder is for."""
CODE = (".py", ".js", ".css", ".sh")
TORCH = ("torch", "triton", "safetensors.torch")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def room_of(module: str) -> str:
    """The room that a module is in: the longest row of the table that its name begins with."""
    parts = module.split(".")
    rows = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(row for row in rows if row in ROOMS)


def ours(imports: list[Import]) -> list[Import]:
    """Imports of our own modules, but for the one name itself."""
    return [each for each in imports if each.target.split(".")[0] in PACKAGES]


def code_files() -> Iterator[Path]:
    """What people have written in the packages, the tests and beside them."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if not (name.startswith(".") or name in ("vendor", "__pycache__", "docs", "build", "dist"))
            and not Path(folder, name).is_symlink()
        ]
        yield from (Path(folder, name) for name in names if name.endswith(CODE))


def test_no_room_imports_from_another_that_it_may_not_know() -> None:
    """The table in ``rooms.py`` says which; a room may always import from itself."""
    wrong = [
        f"{each} (room {room_of(each.source)} may not import from {room_of(each.target)})"
        for each in ours(all_imports())
        if room_of(each.target) not in {room_of(each.source), *ROOMS[room_of(each.source)].split()}
    ]
    assert wrong == []


def test_the_table_has_no_row_too_many() -> None:
    """Every room of the table holds a module, and what a room may import is imported somewhere in it."""
    used = {(room_of(each.source), room_of(each.target)) for each in ours(all_imports())}
    assert {room_of(module) for module in all_modules()} == set(ROOMS)
    assert [
        f"{room}: {other}" for room, others in ROOMS.items() for other in others.split() if (room, other) not in used
    ] == []


def test_rooms_lie_above_each_other() -> None:
    """The table itself has no circle."""
    assert circles({room: set(others.split()) for room, others in ROOMS.items()}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone, and those within functions, count."""
    edges: dict[str, set[str]] = {module: set() for module in all_modules()}
    for each in ours(all_imports()):
        edges[each.source].add(each.target)
    found = circles(edges)
    told = [str(each) for group in found for each in ours(all_imports()) if {each.source, each.target} <= set(group)]
    assert told == []


@pytest.mark.parametrize(
    ("told", "edges"),
    [
        ([], {"a": {"b", "c"}, "b": {"c"}, "c": set()}),
        ([["a", "b", "c"]], {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}),
        ([["b", "c"]], {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}),
        ([["a"]], {"a": {"a"}}),
    ],
)
def test_circles_are_found(told: list[list[str]], edges: Mapping[str, set[str]]) -> None:
    """So a circle in the code would be."""
    assert circles(edges) == told


def test_the_core_of_the_scheduler_is_pure() -> None:
    """No clock, no loop, no bus but its messages, no tensors."""
    wrong = [
        str(each)
        for each in all_imports()
        if any(each.source == name or each.source.startswith(f"{name}.") for name in PURE)
        and any(each.target == name or each.target.startswith(f"{name}.") for name in IMPURE)
        and not each.target.startswith("bus.messages")
    ]
    assert wrong == []


def test_only_the_executor_computes() -> None:
    """Nothing but it imports torch, Triton and our kernels; the kernels import torch and Triton."""
    wrong = [
        str(each)
        for each in all_imports()
        if not each.source.startswith(("actors.executor", "kernels"))
        and any(each.target == name or each.target.startswith(f"{name}.") for name in (*TORCH, "kernels"))
    ]
    assert wrong == []


def test_no_package_imports_tests() -> None:
    """They are not installed."""
    assert [str(each) for each in all_imports() if each.target.split(".")[0] == "tests"] == []


def test_what_web_takes_from_actors_is_named() -> None:
    """The life of an actor, what it says of itself, settings, the model: nothing else."""
    taken = [each for each in ours(all_imports()) if each.source.startswith("web") and each.target.startswith("actors")]
    assert [str(each) for each in taken if room_of(each.target) not in FROM_ACTORS] == []


@pytest.mark.parametrize("folder", [*PACKAGES, NAME, "tests"])
def test_everything_goes_by_the_one_name(folder: str) -> None:
    """``import bus`` works in a checkout, and would make a second copy of every module and class."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(folder)
        for node in nodes(tree(path))
        for name in _imported(node)
        if name.split(".")[0] in PACKAGES
    ]
    assert wrong == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [str(node.module)] if isinstance(node, ast.ImportFrom) else []


def test_tests_import_each_other_by_their_whole_names() -> None:
    """Nothing changes ``sys.path``, so each helper is one module, ``tests.…``, whoever imports it."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("tests")
        for node in nodes(tree(path))
        if _changes_path(node)
    ]
    assert wrong == []


def _changes_path(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys"), attr="path"))):
            return True
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target) if not isinstance(target, ast.Name):
            return ast.unparse(target).startswith("sys.path")
    return False


@pytest.mark.parametrize("line", ["sys.path.insert(0, 'x')", "sys.path += ['x']", "sys.path[:0] = ['x']"])
def test_changes_of_the_path_are_found(line: str) -> None:
    """However it is changed."""
    assert any(map(_changes_path, ast.walk(ast.parse(line))))


def test_no_file_is_too_long() -> None:
    """A file has one idea, and at most so many lines."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code_files()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def functions_of(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """All functions of a module, by their names within it."""
    due: list[tuple[str, ast.AST]] = [("", module)]
    while due:
        scope, node = due.pop()
        for each in ast.iter_child_nodes(node):
            name = f"{scope}{each.name}" if isinstance(each, Function | ast.ClassDef) else ""
            if isinstance(each, Function):
                yield name, each
            due.append((f"{name}." if name else scope, each))


def is_kernel(function: Function) -> bool:
    """Whether it is compiled for a GPU."""
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def num_lines(function: Function) -> int:
    """Lines of a function without its signature and its docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_no_function_is_long() -> None:
    """Each can be read at a glance."""
    long = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in all_modules().values()
        for name, function in functions_of(tree(path))
        if not is_kernel(function) and num_lines(function) > MOST_FUNCTION_LINES
    }
    assert long == TABLES


def test_functions_are_measured() -> None:
    """Those of classes and of functions too, by their whole names."""
    text = "class A:\n @cached\n def f(self):\n  'Text.'\n  if True:\n   def g(): return 1\n  return g\n"
    module = ast.parse(f"{text}@triton.jit\ndef k(): ...")
    found = {name: (num_lines(each), is_kernel(each)) for name, each in functions_of(module)}
    assert found == {"A.f": (3, False), "A.f.g": (1, False), "k": (1, True)}


def test_no_folder_is_too_full() -> None:
    """A folder has one idea, and at most so many files."""
    counts: dict[str, int] = {}
    for path in code_files():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            counts[folder] = counts.get(folder, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    """In the first sentence of its ``__init__.py``."""
    assert [str(folder.relative_to(ROOT)) for folder in rooms() if not idea(folder)] == []


def test_every_folder_is_on_the_map() -> None:
    """docs/house.md has a row for each, with that sentence; ``python -m tests.house.room_map`` writes them."""
    assert "".join(ROW.findall((ROOT / "docs/house.md").read_text())) == rows()


def test_the_name_links_to_the_packages() -> None:
    """``pagebus/`` has the packages by relative links, and nothing else but its own file."""
    folder = ROOT / NAME
    links = {path.name: os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in PACKAGES}
    assert {path.name for path in folder.iterdir() if not path.is_symlink()} - {"__pycache__"} == {"__init__.py"}
