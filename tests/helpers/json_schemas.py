"""JSON schemas as people write them: by hand, and every way in which their parts combine.

Strings and arrays of unknown length are given a small bound: random weights would go on for ever.
"""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string", "maxLength": 8}


def _object(properties: Schema, *, required: list[str] | None = None) -> Schema:
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _dictionary(values: Schema, keys: str = "^[a-z]{1,6}$", high: int = 2, **more: Any) -> Schema:
    pattern = {"patternProperties": {keys: values}, "additionalProperties": False, "maxProperties": high}
    return {"type": "object", **pattern, **more}


LEAVES: dict[str, Schema] = {
    "string": STRING,
    "letters": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
    "code": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3}$"},
    "version": {"type": "string", "pattern": r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}$"},
    "hex": {"type": "string", "pattern": "^#[0-9a-fA-F]{6}$"},
    "phone": {"type": "string", "pattern": r"^\+[1-9][0-9]{6,14}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time", "maxLength": 20},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "pattern": r"^[a-z]{1,8}@[a-z]{1,8}\.(com|org|net)$"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "positive": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99999},
    "even": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 2},
    "percent": {"type": "number", "minimum": 0, "maximum": 1},
    "celsius": {"type": "number", "minimum": -273, "maximum": 5000},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum": {"enum": ["low", "medium", "high", 3, True, None]},
    "const": {"const": {"unit": "cm", "value": 2}},
    "nullable": {"type": ["string", "null"], "maxLength": 6},
    "word or number": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["none", "all"]}]},
}
"""Values of one kind."""

BY_HAND: dict[str, Schema] = {
    "person": _object(
        {
            "name": STRING,
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": LEAVES["email"],
            "address": _object({"street": STRING, "city": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
            "phones": _array(_object({"kind": {"enum": ["home", "work"]}, "number": LEAVES["phone"]}), high=2),
        },
        required=["name", "age", "address"],
    ),
    "invoice": _object(
        {
            "number": LEAVES["code"],
            "issued": LEAVES["date"],
            "currency": {"enum": ["EUR", "USD", "JPY"]},
            "lines": _array(
                _object({"item": STRING, "quantity": LEAVES["positive"], "price": LEAVES["percent"]}), low=1, high=2
            ),
            "paid": {"type": "boolean"},
        }
    ),
    "weather tool": _object({"location": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}}, required=["location"]),
    "search tool": _object(
        {
            "query": STRING,
            "filters": _object({"site": STRING, "after": LEAVES["date"]}, required=[]),
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        },
        required=["query"],
    ),
    "linked list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                {"value": LEAVES["integer"], "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
            )
        },
    },
    "tree": {
        "$defs": {"tree": _object({"name": LEAVES["letters"], "children": _array({"$ref": "#/$defs/tree"}, high=1)})},
        "$ref": "#/$defs/tree",
    },
    "expression": {
        "$defs": {
            "expression": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    _object({"op": {"enum": ["-", "not"]}, "of": {"$ref": "#/$defs/expression"}}),
                ]
            }
        },
        "$ref": "#/$defs/expression",
    },
    "shapes": _array(
        {
            "oneOf": [
                _object({"kind": {"const": "circle"}, "radius": LEAVES["percent"]}),
                _object({"kind": {"const": "square"}, "side": LEAVES["percent"]}),
                _object({"kind": {"const": "text"}, "text": STRING, "font": {"enum": ["serif", "mono"]}}),
            ]
        },
        low=1,
        high=2,
    ),
    "feature": _object(
        {
            "type": {"const": "Feature"},
            "geometry": _object(
                {
                    "type": {"const": "Point"},
                    "coordinates": {
                        "type": "array",
                        "prefixItems": [
                            {"type": "number", "minimum": -180, "maximum": 180},
                            {"type": "number", "minimum": -90, "maximum": 90},
                        ],
                        "items": False,
                        "minItems": 2,
                        "maxItems": 2,
                    },
                }
            ),
            "properties": _dictionary(LEAVES["integer"]),
        }
    ),
    "dictionary": _dictionary(_array(LEAVES["boolean"]), high=3),
    "keys by pattern": _dictionary(LEAVES["integer"], keys="^x-[a-z]{1,4}$"),
    "extended base": {
        "allOf": [
            {"type": "object", "properties": {"id": LEAVES["uuid"]}, "required": ["id"]},
            {"type": "object", "properties": {"label": STRING}, "required": ["label"]},
        ],
        "maxProperties": 2,
    },
    "reasoning": _object(
        {
            "steps": _array(_object({"explanation": STRING, "output": STRING}), low=1, high=2),
            "final_answer": STRING,
        }
    ),
    "classification": _object(
        {
            "label": {"type": "string", "enum": ["spam", "ham", "grün", 'quote"d', "back\\slash", "日本"]},
            "score": LEAVES["percent"],
        }
    ),
    "package": _object(
        {
            "name": {"type": "string", "pattern": "^@?[a-z]{1,8}(/[a-z]{1,8})?$"},
            "version": LEAVES["version"],
            "scripts": _dictionary(STRING),
            "private": {"type": "boolean"},
        },
        required=["name", "version"],
    ),
    "log line": _object(
        {
            "at": LEAVES["date-time"],
            "level": {"enum": ["debug", "info", "warning", "error"]},
            "message": STRING,
            "context": _dictionary(LEAVES["nullable"]),
        },
        required=["at", "level", "message"],
    ),
    "matrix": _array(_array(LEAVES["integer"], 2, 2), 2, 2),
    "all optional": _object({name: LEAVES[name] for name in ("string", "integer", "date", "enum")}, required=[]),
    "empty object": _object({}),
    "empty array": {"type": "array", "maxItems": 0},
    "unicode names": _object({"größe": LEAVES["integer"], "名前": STRING, "with space": LEAVES["boolean"]}),
    "names to escape": _object({'a"b': LEAVES["boolean"], "c\\d": LEAVES["null"], "e\nf": LEAVES["integer"]}),
    "definitions": {
        "definitions": {"id": LEAVES["uuid"], "tag": LEAVES["letters"]},
        **_object({"id": {"$ref": "#/definitions/id"}, "tags": _array({"$ref": "#/definitions/tag"})}),
    },
    "many fields": _object({f"field_{index}": LEAVES["boolean"] for index in range(40)}),
    "many optional fields": _object({f"field_{index}": LEAVES["boolean"] for index in range(40)}, required=["field_7"]),
    "large enum": {"enum": [f"country-{index:03d}" for index in range(250)]},
}


def _format(name: str, most: int) -> Schema:
    return {"type": "string", "format": name, "maxLength": most}


_KIND = {"circle": {"radius": LEAVES["percent"]}, "square": {"side": LEAVES["positive"]}, "point": {}}
_POINT = {"type": "array", "prefixItems": [LEAVES["celsius"]] * 2, "items": False, "minItems": 2}
PUBLIC: dict[str, Schema] = {
    "JSON-RPC request": _object(
        {
            "jsonrpc": {"const": "2.0"},
            "method": LEAVES["letters"],
            "params": {"anyOf": [_array(LEAVES["integer"]), _dictionary(STRING)]},
            "id": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        },
        required=["jsonrpc", "method"],
    ),
    "GeoJSON geometry": {
        "oneOf": [
            _object({"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}}),
            _object({"type": {"const": "LineString"}, "coordinates": _array({"$ref": "#/$defs/position"}, low=2)}),
        ],
        "$defs": {"position": _POINT},
    },
    "CloudEvent": _object(
        {
            "specversion": {"const": "1.0"},
            "id": LEAVES["uuid"],
            "source": _format("uri", 40),
            "type": {"type": "string", "pattern": "^com(\\.[a-z]{1,6}){1,3}$"},
            "time": LEAVES["date-time"],
            "data": {"anyOf": [STRING, _dictionary(LEAVES["integer"]), {"type": "null"}]},
        },
        required=["specversion", "id", "source", "type"],
    ),
    "RFC 9457 problem": _object(
        {
            "type": _format("uri", 40),
            "title": STRING,
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "errors": _array(_object({"pointer": {"type": "string", "pattern": "^(/[a-z]{1,5}){1,3}$"}})),
        },
        required=["title", "status"],
    ),
    "contact": _object({"email": _format("email", 30), "site": _format("hostname", 30), "since": LEAVES["date"]}),
    "host": _object({"name": _format("hostname", 30), "v4": LEAVES["ipv4"], "v6": _format("ipv6", 40)}),
    "timer": _object({"lasts": _format("duration", 12), "every": {"enum": ["hour", "day"]}, "at": LEAVES["time"]}),
    "tagged union": {
        "oneOf": [_object({"kind": {"const": kind}, **more}) for kind, more in _KIND.items()],
    },
    "bounds of two": _object(
        {
            "amount": {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 70, "multipleOf": 7}]},
            "code": {"allOf": [LEAVES["letters"], {"minLength": 3}]},
        }
    ),
    "container": _object(
        {
            "image": {"type": "string", "pattern": "^[a-z]{1,6}(:[a-z0-9.]{1,6})?$"},
            "ports": _array({"type": "string", "pattern": "^[1-9][0-9]{1,3}:[1-9][0-9]{1,3}$"}),
            "environment": _dictionary(STRING, "^[A-Z_]{1,6}$"),
            "restart": {"enum": ["no", "always", "on-failure"]},
        },
        required=["image"],
    ),
    "pipeline": _object(
        {
            "on": {"anyOf": [{"enum": ["push", "pull_request"]}, _array({"enum": ["push", "pull_request"]}, low=1)]},
            "jobs": _dictionary(
                _object(
                    {
                        "needs": _array(LEAVES["letters"]),
                        "steps": _array(
                            {
                                "anyOf": [
                                    _object({"run": STRING}),
                                    _object({"uses": STRING, "with": _dictionary(STRING)}),
                                ]
                            },
                            low=1,
                        ),
                    },
                    required=["steps"],
                )
            ),
        }
    ),
    "tool with options": _object(
        {
            "location": STRING,
            "unit": {"type": ["string", "null"], "enum": ["celsius", "fahrenheit", None]},
            "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 14}, {"type": "null"}]},
        }
    ),
}
"""After documents that people exchange, made finite."""


def schemas() -> dict[str, Schema]:
    """All of them, by name."""
    found = LEAVES | BY_HAND | PUBLIC
    for name, leaf in LEAVES.items():
        found[f"object of {name}"] = _object({"value": leaf})
        found[f"optional {name}"] = _object({"before": {"type": "boolean"}, "value": leaf}, required=["before"])
        found[f"array of {name}"] = _array(leaf, 1, 2)
        found[f"dictionary of {name}"] = _dictionary(leaf, properties={"value": leaf}, required=["value"])
        found[f"reference to {name}"] = {"$defs": {"it": leaf}, **_object({"a": {"$ref": "#/$defs/it"}})}
    for (first, one), (second, other) in itertools.islice(itertools.combinations(LEAVES.items(), 2), 0, None, 4):
        found[f"{first} or {second}"] = {"anyOf": [_object({"first": one}), _object({"second": other})]}
        found[f"{first} in {second}"] = _object({"outer": _object({"inner": one, "list": _array(other, 0, 2)})})
    return found
