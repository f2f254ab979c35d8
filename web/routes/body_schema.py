"""Derives the JSON Schema of a body from the code that validates it.

A parser runs over examples while a listener records what it reads from its :class:`pagebus.web.http.fields.Fields`:
names, types, ranges, defaults. A field is required if an example without it is rejected for that, and none does without
it. The schema therefore always agrees with the code. A body may be translated for another parser: it describes the
fields that were handed on as they are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pagebus.web.http.errors import ApiError
from pagebus.web.http.fields import LISTENER, Schema
from pagebus.web.http.limits import INT32_MAX
from pagebus.web.requests.served_model import ServedModel

Parser = Callable[[dict[str, Any], ServedModel], object]
"""Reads a body; raises :class:`ApiError` if there is something wrong with it."""
Path = tuple[str, ...]
"""``("messages", "[]", "role")``"""
ITEMS = "[]"
NEVER: Schema = {"enum": []}
"""Schema of fields that must not be given."""
_STEP = re.compile(r"\[[0-9]+\]|[^.\[]+")


def body_schema(parse: Parser, examples: Sequence[Mapping[str, Any]], model: ServedModel) -> dict[str, Any]:
    """The schema of what ``parse`` reads. Between them, the examples reach all that it can ask for, and do without all
    that may be missing."""
    asked: dict[Path, dict[str, Any]] = {}
    more: dict[Path, dict[str, Any]] = {}

    def listen(name: str, schema: Schema, *, translated: bool = False) -> None:
        path, known = _path(name), more if translated else asked
        known[path] = _merged(known[path], schema) if path in known else dict(schema)

    token = LISTENER.set(listen)
    try:
        for example in examples:
            parse(copy.deepcopy(dict(example)), model)
    finally:
        LISTENER.reset(token)
    asked |= _of_translations(asked, more)
    required = {_path(name) for example in examples for name in _required(parse, example, model)}
    return _assembled((), asked, {path for path in required if not any(_lack(each, path) for each in examples)})


def _of_translations(asked: Mapping[Path, dict[str, Any]], more: Mapping[Path, dict[str, Any]]) -> dict[Path, Any]:
    """What is known of fields that were handed on as they are, and of what is within them. What the client's own body
    is held to, or what was looked into there, is as its reader says."""
    looked_into = {path[:size] for path in asked for size in range(len(path))}
    handed_on = {path for path in asked.keys() - looked_into if not {"enum", "anyOf"} & asked[path].keys()}
    found = {}
    for path, schema in more.items():
        if path not in asked and any(path[:size] in handed_on for size in range(1, len(path))):
            found[path] = schema
        elif path in handed_on and (not asked[path] or (asked[path].keys() == {"type"} and "anyOf" not in schema)):
            found[path] = {**schema, **asked[path]}
    return found


def _lack(value: object, path: Sequence[str]) -> bool:
    """Whether there is an object within ``value`` without the field at ``path``, which can then be left out."""
    if not path:
        return False
    name, *rest = path
    if name == ITEMS:
        return isinstance(value, list | tuple) and any(_lack(each, rest) for each in value)
    if not isinstance(value, Mapping):
        return False
    return _lack(value[name], rest) if name in value else not rest


def _path(name: str) -> Path:
    return tuple(ITEMS if step.startswith("[") else step for step in _STEP.findall(name))


def _merged(known: Mapping[str, Any], more: Schema) -> dict[str, Any]:
    """What fits either: ranges that depend on other fields become the widest."""
    merged = {**more, **known}
    for bound, widest in (("minimum", min), ("maximum", max)):
        if bound in known and bound in more:
            merged[bound] = widest(known[bound], more[bound])
    return merged


def _required(parse: Parser, example: Mapping[str, Any], model: ServedModel) -> Iterator[str]:
    """Names of the example's fields that cannot be left out."""
    for steps in _places(example):
        shorter = copy.deepcopy(dict(example))
        parent: Any = shorter
        for step in steps[:-1]:
            parent = parent[step]
        del parent[steps[-1]]
        try:
            parse(shorter, model)
        except ApiError as error:
            if error.param is not None and error.message.startswith(f"{error.param}: is required"):
                yield error.param


def _places(value: object, steps: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the fields of all objects within ``value`` are."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield (*steps, name)
            yield from _places(inner, (*steps, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _places(inner, (*steps, index))


def _assembled(path: Path, asked: Mapping[Path, Mapping[str, Any]], required: set[Path]) -> dict[str, Any]:
    """The schema at ``path`` with all that is below it."""
    schema = _tidy(asked.get(path, {}))
    if "anyOf" in schema:
        return schema  # written out where it is read
    below = [known for known in asked if len(known) == len(path) + 1 and known[: len(path)] == path]
    below = [known for known in below if asked[known] != NEVER]
    properties = {known[-1]: _assembled(known, asked, required) for known in below if known[-1] != ITEMS}
    if properties:
        names = [known[-1] for known in below if known in required]
        schema |= {"type": "object", "properties": {n: s if n in names else _or_null(s) for n, s in properties.items()}}
        schema |= {"required": names} if names else {}
    if any(known[: len(path) + 1] == (*path, ITEMS) for known in asked):
        schema["items"] = _assembled((*path, ITEMS), asked, required)
    return schema


def _tidy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    nothing: dict[str, Any] = {"default": None, "minLength": 0, "minItems": 0, "items": {}}
    kept = {name: value for name, value in schema.items() if name not in nothing or value != nothing[name]}
    if kept.get("maxLength", 0) >= INT32_MAX:
        del kept["maxLength"]
    return kept


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A field that may be left out may be null."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], *([] if None in schema["enum"] else [None])]}
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return {**schema, "type": [*types, *([] if "null" in types else ["null"])]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema
