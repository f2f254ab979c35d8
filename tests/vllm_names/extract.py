"""Read vLLM's source distribution, as it lies at the index, and list its routes, their fields and the flags of `serve`.

    python -m tests.vllm_names.extract            # compares with names.json, and fails if anything differs
    python -m tests.vllm_names.extract --write    # writes names.json

Nothing of it is built or run: its files are parsed. Tests compare docs/compatibility with names.json alone.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vllm_names import STORED, stored

VERSION = "0.33.0"
METHODS = ("get", "post", "put", "delete", "patch", "websocket")
SERVE_ARGUMENTS = "vllm/entrypoints/common/cli_args.py"
ENGINE_ARGUMENTS = "vllm/engine/arg_utils.py"
FRONTEND_CLASSES = ("BaseFrontendArgs", "FrontendArgs")
NOT_OF_SERVE = ("vllm/entrypoints/launchers/", "vllm/entrypoints/cli/")
"""Servers of their own: not what `vllm serve` answers."""


def fetch(version: str, folder: Path) -> Path:
    """Download and unpack the source distribution; returns its folder.

    `pip download` would build it first, to learn what it needs, so only pip's own search and session are used.

    Raises:
        SystemExit: there is none of this version, or it is not what the index says.
    """
    from pip._internal.commands.download import DownloadCommand

    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    with command.main_context():
        session: Any = command._build_session(options)  # type: ignore[no-untyped-call, unused-ignore]
        finder: Any = command._build_package_finder(options, session)
        found = [each for each in finder.find_all_candidates("vllm") if str(each.version) == version]
        if not found:
            raise SystemExit(f"The index has no source distribution of vllm {version}.")
        link = found[0].link
        data = session.get(link.url_without_fragment).content
    if link.hash_name and hashlib.new(link.hash_name, data).hexdigest() != link.hash:
        raise SystemExit(f"{link.filename} is not what the index says.")
    archive = folder / link.filename
    archive.write_bytes(data)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / f"vllm-{version}"


class Sources:
    """The parsed files of the package that define routes and bodies."""

    def __init__(self, root: Path) -> None:
        paths = [*sorted((root / "vllm/entrypoints").rglob("*.py")), root / "vllm/engine/arg_utils.py"]
        paths += [root / "vllm/sampling_params.py"]
        self.modules = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        for module in self.modules.values():
            for node in module.body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.aliases.setdefault(node.targets[0].id, node.value)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                    self.aliases.setdefault(node.target.id, node.value)

    def bodies(self, annotation: ast.expr | None, seen: frozenset[str] = frozenset()) -> Iterator[ast.ClassDef]:
        """The classes of bodies that an annotation names, also by an alias of several."""
        for node in ast.walk(annotation) if annotation is not None else ():
            if not isinstance(node, ast.Name) or node.id in seen:
                continue
            if node.id in self.classes and self.fields(self.classes[node.id]):
                yield self.classes[node.id]
            elif node.id in self.aliases:
                yield from self.bodies(self.aliases[node.id], seen | {node.id})

    def fields(self, of: ast.ClassDef) -> set[str]:
        """Names of the fields of a model, those of its bases too."""
        own = {
            node.target.id
            for node in of.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not node.target.id.startswith("_")
            and "ClassVar" not in ast.dump(node.annotation)
        }
        bases = {base.id for base in of.bases if isinstance(base, ast.Name)}
        return own.union(*(self.fields(self.classes[base]) for base in bases if base in self.classes))


def routes_of(sources: Sources) -> dict[str, list[str]]:
    """Fields of bodies and queries, by method and path."""
    found: dict[str, set[str]] = {}
    for name, module in sources.modules.items():
        if name.startswith(NOT_OF_SERVE):
            continue
        functions = [each for each in ast.walk(module) if isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef)]
        for function in functions:
            for route in filter(None, map(_route, function.decorator_list)):
                found.setdefault(route, set()).update(_parameters(sources, function))
        by_name = {function.name: function for function in functions}
        for call in (each for each in ast.walk(module) if isinstance(each, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_api_route":
                path, handler = _text(call.args[0]), call.args[1]
                if path is not None and isinstance(handler, ast.Name):
                    fields = _parameters(sources, by_name[handler.id]) if handler.id in by_name else set()
                    found.setdefault(f"POST {path}", set()).update(fields)
    return {route: sorted(fields) for route, fields in sorted(found.items())}


def _route(decorator: ast.expr) -> str | None:
    """``POST /path`` of ``@router.post("/path", ...)``."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
        return None
    method = decorator.func.attr
    if method not in METHODS or not isinstance(decorator.func.value, ast.Name):
        return None
    path = _text(decorator.args[0]) if decorator.args else None
    return f"{'GET' if method == 'websocket' else method.upper()} {path}" if path is not None else None


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _parameters(sources: Sources, function: ast.AsyncFunctionDef | ast.FunctionDef) -> set[str]:
    """What a handler takes: the fields of its body, and parameters of the query or of a body without a class; of one
    that reads the body by hand, what it asks it for."""
    names: set[str] = set()
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + list(function.args.defaults)
    for argument, default in zip(arguments, defaults, strict=False):
        texts = [ast.dump(each) for each in (argument.annotation, default) if each is not None]
        if any("id='Query'" in text or "arg='embed'" in text for text in texts):
            names.add(argument.arg)
            continue
        for body in sources.bodies(argument.annotation):
            names |= sources.fields(body)
    for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
        asks = isinstance(call.func, ast.Attribute) and call.func.attr in ("get", "getlist") and call.args
        if asks and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value).endswith(("body", "params")):
            names.update(filter(None, [_text(call.args[0])]))
    return names


def flags_of(sources: Sources) -> list[str]:
    """All options of `vllm serve`, short ones too."""
    flags: set[str] = set()
    for name in FRONTEND_CLASSES:
        own = [node for node in sources.classes[name].body if isinstance(node, ast.AnnAssign)]
        flags |= {"--" + node.target.id.replace("_", "-") for node in own if isinstance(node.target, ast.Name)}
    for module in (sources.modules[SERVE_ARGUMENTS], sources.modules[ENGINE_ARGUMENTS]):
        for call in (each for each in ast.walk(module) if isinstance(each, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                flags |= {text for text in map(_text, call.args) if text is not None and text.startswith("-")}
    return sorted(flags)


def extract(root: Path, version: str) -> dict[str, Any]:
    """All names of the unpacked distribution."""
    sources = Sources(root)
    return {"version": version, "routes": routes_of(sources), "flags": flags_of(sources)}


def differences(old: Any, new: Any) -> list[str]:
    """What one of them has and the other one has not, a line each."""
    lines = [f"- {each}" for each in old["flags"] if each not in new["flags"]]
    lines += [f"+ {each}" for each in new["flags"] if each not in old["flags"]]
    for sign, here, there in (("-", old["routes"], new["routes"]), ("+", new["routes"], old["routes"])):
        for route, fields in here.items():
            missing = [f": {name}" for name in fields if name not in there.get(route, ())]
            lines += [f"{sign} {route}{what}" for what in (missing if route in there else ["", *missing])]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default=VERSION)
    parser.add_argument("--source", type=Path, help="an unpacked distribution, instead of the index")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.source or fetch(arguments.version, Path(folder))
        found = extract(root, arguments.version)
    if arguments.write:
        STORED.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    lines = differences(stored(), found)
    print("\n".join(lines) or f"vllm {arguments.version}: {len(found['flags'])} flags, {len(found['routes'])} routes")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
