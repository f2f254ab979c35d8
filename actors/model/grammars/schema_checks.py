"""Checks of what the grammar engine reads otherwise than it is meant, and would follow to an output that is not valid.

What the engine does not know at all it refuses itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value holds a schema for each name."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose value is no schema, whatever it looks like."""
LEAST, MOST = -(2**63), 2**63 - 1
"""Integers that the engine knows."""
EXACT = 2**53
"""Up to here it knows each of them: it reads bounds as floating-point numbers."""


class BadSchema(ValueError):
    """A schema, or an expression, that cannot be served; the text says why."""


def check_schema(schema: object) -> None:
    """Look at a JSON schema and all schemas in it.

    Raises:
        BadSchema: an output that follows it might be invalid.
    """
    for each in _schemas_in(schema):
        if "x-guidance" in each:
            raise BadSchema("x-guidance is not supported")
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            bound = each.get(name)
            if isinstance(bound, int | float) and _is_rounded(name, bound):
                raise BadSchema(f"{name}: {bound} cannot be kept exactly; bounds may be up to 2**53 either way")
        for regex in (each.get("pattern"), *_names(each, "patternProperties")):
            if isinstance(regex, str):
                check_regex(regex)
        _check_names(each)


def check_regex(regex: str) -> None:
    """The engine drops a backslash at the end.

    Raises:
        BadSchema: there is one, which escapes nothing.
    """
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise BadSchema("a regular expression must not end with a backslash that escapes nothing")


def _schemas_in(schema: object) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, Mapping):
            yield each
            for name, value in each.items():
                if name in BY_NAME and isinstance(value, Mapping):
                    waiting.extend(value.values())
                elif name not in VALUES:
                    waiting.append(value)


def _is_rounded(name: str, bound: float) -> bool:
    """Whether the engine takes a bound for another that lets more through."""
    bound = max(-2.0 * EXACT**2, min(bound, 2.0 * EXACT**2))  # of any size, as it comes from Python
    read = float(bound)
    if name == "minimum":
        return read > MOST or read < bound
    if name == "maximum":
        return read < LEAST or MOST > read > bound
    return abs(read) > EXACT


def _check_names(schema: Mapping[str, Any]) -> None:
    """Nothing keeps a model from writing a name twice, unless it is one of ``properties``; the engine counts both."""
    least, required = schema.get("minProperties"), schema.get("required")
    are_open = schema.get("additionalProperties") is not False or bool(_names(schema, "patternProperties"))
    certain = len(required) if isinstance(required, list) else 0
    if type(least) is int and least > max(1, certain) and are_open:
        raise BadSchema("minProperties: must not be more than 1, or than what is required, unless names are fixed")


def _names(schema: Mapping[str, Any], keyword: str) -> tuple[Any, ...]:
    value = schema.get(keyword)
    return tuple(value) if isinstance(value, Mapping) else ()
