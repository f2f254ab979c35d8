"""Objects are complete when constructed, and nobody else sets their attributes afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.imports import ROOT, all_modules, nodes, tree

BIRTH = ("__init__", "__post_init__", "__new__", "__set_name__")
PLAIN = ("ABC", "Exception", "Generic", "Protocol", "NamedTuple", "RuntimeError", "ValueError", "msgspec.Struct")
"""Bases of other people that bring no attributes to assign."""
ELSEWHERE = {
    "web/telemetry/metrics.py": {"first_token_s", "first_token_seen", "first_tokens", "last_token_s", "num_counted"},
    "bus/redis/url.py": {"_writer"},
}
"""Attributes that are set from outside: of choices for each token, where a call would take as long as the rest; and of
a connection of redis-py, which is not ours."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def all_trees() -> dict[Path, ast.Module]:
    """What the packages' files say."""
    return {path: tree(path) for path in all_modules().values()}


def classes(trees: dict[Path, ast.Module]) -> dict[str, ast.ClassDef]:
    """By name, every class of ours."""
    return {node.name: node for each in trees.values() for node in nodes(each) if isinstance(node, ast.ClassDef)}


def functions(node: ast.ClassDef) -> dict[str, Function]:
    """The methods of a class, by name."""
    return {each.name: each for each in node.body if isinstance(each, Function)}


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned in here, in any way."""
    for each in nodes(node) if isinstance(node, ast.Module) else ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each


def of_self(attribute: ast.Attribute) -> bool:
    """Whether it is one of the object that the method belongs to."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def constructors(node: ast.ClassDef) -> Iterator[Function]:
    """Methods that run while an object is constructed: the constructor, and those that it calls on the object."""
    methods, seen = functions(node), set(BIRTH)
    due = [name for name in BIRTH if name in methods]
    while due:
        method = methods[due.pop()]
        yield method
        for each in ast.walk(method):
            match each:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)) if (
                    name in methods.keys() - seen
                ):
                    seen.add(name)
                    due.append(name)


def is_ours(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> bool:
    """Whether all that its objects have is written here: its bases are ours as well, or bring no attributes."""
    names = [ast.unparse(base).split("[")[0] for base in node.bases]
    ours = [known[name] for name in names if name in known and known[name] is not node]
    return all(name in known or name in PLAIN for name in names) and all(is_ours(each, known) for each in ours)


def is_record(node: ast.ClassDef) -> bool:
    """Whether its constructor is made from its fields: a dataclass, a Struct of msgspec, a tuple; or it has none."""
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    return bool(node.decorator_list) or bool(bases & {"Record", "Struct", "NamedTuple", "TypedDict", "Protocol"})


def born_with(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """Attributes that an object of this class has once it is constructed, those of our base classes included."""
    names = {each.attr for method in constructors(node) for each in assigned(method) if of_self(each)}
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None or is_record(node):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for base in node.bases:
        name = ast.unparse(base).split("[")[0]
        if name in known and known[name] is not node:
            names |= born_with(known[name], known)
    return names


def late(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Attributes that an object gets some time after it was constructed."""
    known = classes(trees)
    for path, module in trees.items():
        for node in nodes(module):
            if not isinstance(node, ast.ClassDef) or not is_ours(node, known):
                continue
            names = born_with(node, known) | properties(node)
            for method in functions(node).values():
                for each in assigned(method):
                    if of_self(each) and each.attr not in names:
                        yield f"{path}:{each.lineno}: {node.name}.{method.name} is the first to set self.{each.attr}"


def properties(node: ast.ClassDef) -> set[str]:
    """Names with a setter."""
    return {name for name, method in functions(node).items() if method.decorator_list}


def asked_of_self(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Places that find out whether the object is complete, and go on if it is not."""
    for path, module in trees.items():
        for node in nodes(module):
            match node:
                case (
                    ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id="self"), _])
                    | ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), _, _])
                ):
                    yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def attributes_of(module: ast.Module) -> set[str]:
    """All attributes of the classes in a file."""
    names = {each.attr for each in assigned(module) if of_self(each)}
    for node in nodes(module):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                match each:
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        names.add(name)
                    case ast.Assign(targets=targets):
                        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def set_elsewhere(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """By file, attributes that it sets of objects whose class is in another file. Only names tell: one that a class of
    the file itself has too is not found."""
    own = {path: attributes_of(module) for path, module in trees.items()}
    ours = set().union(*own.values())
    found = {
        str(path.relative_to(ROOT)): {each.attr for each in assigned(module) if not of_self(each)} & (ours - own[path])
        for path, module in trees.items()
    }
    return {path: names for path, names in found.items() if names}


def shown(found: Iterator[str]) -> list[str]:
    """Without the repository's own path."""
    return [each.removeprefix(f"{ROOT}/") for each in found]


def test_objects_are_complete_when_constructed() -> None:
    """Every attribute of an object is there once its constructor has run. What comes later has a type of its own."""
    assert shown(late(all_trees())) == []


def test_attributes_are_set_where_their_class_is() -> None:
    """Others call a method that says what happens."""
    assert set_elsewhere(all_trees()) == ELSEWHERE


def test_what_is_set_elsewhere_is_found() -> None:
    """So it would be in the code."""
    texts = {"a.py": "class A:\n x: int\n def go(self, other):\n  other.x = 1", "b.py": "def f(a):\n a.x, a.y = 1, 2"}
    assert set_elsewhere({ROOT / path: ast.parse(text) for path, text in texts.items()}) == {"b.py": {"x"}}


def test_notes_are_only_logged() -> None:
    """A note is made by the core, logged by the actor and shown by the simulator: nothing else knows the type."""
    knowing = {str(path.relative_to(ROOT)) for path, each in all_trees().items() if "Note" in names_in(each)}
    assert {each for each in knowing if not each.startswith("actors/scheduler/core/")} == {
        "actors/scheduler/events.py",
        "actors/scheduler/outputs.py",
        "actors/simulator/simulation.py",
    }


def names_in(module: ast.Module) -> set[str]:
    """Names that a module defines, imports or uses."""
    return {getattr(node, "id", getattr(node, "name", "")) for node in nodes(module)}


def test_no_object_is_asked_whether_it_is_complete() -> None:
    """No ``hasattr(self, ...)`` and the like."""
    assert shown(asked_of_self(all_trees())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class A:\n def __init__(self):\n  self.x = 1\n def go(self):\n  self.x = 2", 0),
        ("class A:\n def __init__(self):\n  self._fill()\n def _fill(self):\n  self.x, self.y = 1, 2", 0),
        ("class A:\n x = 0\n def go(self):\n  self.x += 1", 0),
        ("class A:\n def __init__(self):\n  self.x = 0\nclass B(A):\n def go(self):\n  self.x = 1", 0),
        ("class A:\n def go(self):\n  self.x = 1", 1),
        ("class A:\n async def start(self):\n  self.x, self.y = 1, 2", 2),
        ("class A(Exception):\n def go(self):\n  self.x = 1", 1),
        ("class A:\n x: int\n def go(self):\n  self.x = 1", 1),
        ("class A(web.Handler):\n def go(self):\n  self.x = 1", 0),
        ("class A:\n def go(self):\n  return hasattr(self, 'x')", 1),
    ],
)
def test_what_is_late_is_found(text: str, found: int) -> None:
    """So it would be in the code."""
    trees = {ROOT / "a.py": ast.parse(text)}
    assert len([*late(trees), *asked_of_self(trees)]) == found
