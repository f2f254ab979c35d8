"""What the grammar engine reads otherwise than it is meant, and would follow to an output that is not valid.

It is refused, or said in words that the engine reads right. What the engine does not know at all it refuses itself.
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
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAYS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])|[0-9]{{4}}-02-(?:[01]|2[0-8])|{_LEAP}-02-29)"
_SECONDS = "^[^:]*:[^:]*:[0-5]"
NARROWER = {"date": (_DAYS,), "time": (_SECONDS,), "date-time": (_DAYS, _SECONDS)}
"""Expressions that strings of a format follow, too: the engine takes a second 60, and a 29 February of any year."""


class BadSchema(ValueError):
    """A schema, or an expression, that cannot be served; the text says why."""


def prepare_schema(schema: object) -> None:
    """Look at a JSON schema and all schemas in it, and narrow formats in place.

    Raises:
        BadSchema: an output that follows it might be invalid.
    """
    for each in _schemas_in(schema):
        if "x-guidance" in each:
            raise BadSchema("x-guidance is not supported")
        _check_bounds(each)
        for name in ("const", "enum"):
            _check_numbers(name, each.get(name))
        for regex in (each.get("pattern"), *_names(each, "patternProperties")):
            if isinstance(regex, str):
                check_regex(regex)
        _check_names(each)
        if patterns := NARROWER.get(str(each.get("format"))):
            others = each.get("allOf")
            each["allOf"] = [*(others if isinstance(others, list) else ()), *({"pattern": one} for one in patterns)]


def check_regex(regex: str) -> None:
    """The engine drops a backslash at the end.

    Raises:
        BadSchema: there is one, which escapes nothing.
    """
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise BadSchema("a regular expression must not end with a backslash that escapes nothing")


def _schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, dict):
            yield each
            for name, value in each.items():
                if name in BY_NAME and isinstance(value, dict):
                    waiting.extend(value.values())
                elif name not in VALUES:
                    waiting.append(value)


def _check_bounds(schema: Mapping[str, Any]) -> None:
    """Bounds are read exactly, and none that excludes itself lets itself through."""
    given = {name: schema[name] for name in BOUNDS if type(schema.get(name)) in (int, float)}
    for name, bound in given.items():
        if _is_rounded(name, bound):
            raise BadSchema(f"{name}: {bound} cannot be kept exactly; bounds may be up to 2**53 either way")
    if schema.get("type") == "integer":
        return
    for least, others, sign in (("exclusiveMinimum", BOUNDS[2:], 1), ("exclusiveMaximum", BOUNDS[:2], -1)):
        bound = given.get(least)
        if bound is not None and bound == int(bound) and sign * bound >= 0:
            near = [name for name in others if name in given and sign * (given[name] - bound) < 1]
            if near:
                raise BadSchema(f"{least}: {bound} cannot be kept beside a {near[0]} that is less than 1 away")


def _check_numbers(name: str, value: object) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, int | float) and abs(each) > EXACT:
            raise BadSchema(f"{name}: {each} cannot be kept exactly; numbers may be up to 2**53 either way")


def _is_rounded(name: str, bound: float) -> bool:
    """Whether the engine takes a bound for another that lets more through."""
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
