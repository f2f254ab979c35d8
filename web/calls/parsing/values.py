"""Converts bare argument values to the JSON types that the tool's schema declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Types = frozenset[str]
"""JSON Schema's names of types."""
STRING: Types = frozenset({"string"})
"""The types assumed where a schema declares none."""
MAX_DEPTH = 16
_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def types_of(schema: object, root: Mapping[str, Any], followed: dict[str, Types], depth: int = 0) -> Types:
    """The types that a value may have by ``schema``, a part of ``root``, in which references are looked up.

    ``followed``: the types of references in this ``root``. Each is followed once: schemas may refer to themselves, and
    many times.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return STRING
    found: set[str] = set()
    if isinstance(target := schema.get("$ref"), str):
        if target not in followed:
            followed[target] = frozenset()  # where it refers to itself
            followed[target] = types_of(_find(target, root), root, followed, depth + 1)
        found |= followed[target]
    said = schema.get("type")
    found |= {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)}
    known = [schema["const"]] if "const" in schema else schema.get("enum")
    found |= {_NAMES.get(type(value), "null") for value in (known if isinstance(known, list) else ())}
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else ():
            found |= types_of(part, root, followed, depth + 1)
    return frozenset(found) or STRING


def _find(target: str, root: object) -> object:
    """What a reference within the document means."""
    for step in target.removeprefix("#").strip("/").split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def typed(text: str, types: Types) -> str:
    """``text`` as JSON: a value of one of the types, the narrowest first; a string if it is none."""
    stripped = text.strip()
    value = _parsed(stripped)
    if "null" in types and stripped.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower()
    if types & {"integer", "number"} and type(value) in (int, float):
        whole = "number" not in types and isinstance(value, float) and value.is_integer()
        return json.dumps(int(value) if whole else value)
    if ("object" in types and type(value) is dict) or ("array" in types and type(value) is list):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """A JSON value; None if it is none, or one that JSON cannot say."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, RecursionError):
        return None
