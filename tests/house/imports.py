"""What the packages import, as their sources say: every import, also those within functions and for types alone."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "pagebus"
PACKAGES = ("actors", "bus", "kernels", "web")


@dataclass(frozen=True, slots=True)
class Import:
    """``file`` imports, in ``line``, the module ``target``: without ``pagebus.`` if it is one of ours."""

    file: str
    line: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} imports {self.target}"


def sources(*folders: str) -> list[Path]:
    """Python files below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """``actors/runtime/actor.py`` as ``actors.runtime.actor``, a package by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    """Each module that a file imports. ``from package import module`` is an import of the module."""
    file, source = str(path.relative_to(ROOT)), module_of(path)
    for node in nodes(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            base = str(node.module)
            names = [_module_or_symbol(base, alias.name, modules) for alias in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            yield Import(file, node.lineno, source, name.removeprefix(f"{NAME}."))


def _module_or_symbol(base: str, name: str, modules: Mapping[str, Path]) -> str:
    full = f"{base}.{name}"
    return full if full.removeprefix(f"{NAME}.") in modules else base


@functools.cache
def tree(path: Path) -> ast.Module:
    """What a file says, parsed once for all tests that ask."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(module: ast.Module) -> list[ast.AST]:
    """All that a file's tree holds, walked once for all tests that ask."""
    return list(ast.walk(module))


@functools.cache
def all_modules() -> dict[str, Path]:
    """All modules of the packages."""
    return {module_of(path): path for path in sources(*PACKAGES)}


@functools.cache
def all_imports() -> list[Import]:
    """All that they import. Read when a test asks: every process of a run collects this file."""
    modules = all_modules()
    return [each for path in modules.values() for each in imports_of(path, modules)]


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that can be reached from one another, by Tarjan's algorithm, without recursion."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in edges:
        if start in index:
            continue
        work = [(start, iter(sorted(edges[start])))]
        index[start] = lowest[start] = len(index)
        stack.append(start)
        while work:
            name, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = lowest[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(edges.get(target, ())))))
                    break
                if target in stack:
                    lowest[name] = min(lowest[name], index[target])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == index[name]:
                    group = stack[stack.index(name) :]
                    del stack[stack.index(name) :]
                    if len(group) > 1 or name in edges.get(name, ()):
                        found.append(sorted(group))
    return found
