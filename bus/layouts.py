"""How dataclasses lie in JSON: a layout per class, and for each of its fields a decoder made from the type hint.

A value that does not fit its hint raises :class:`Mismatch`, with the path of the field.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from bus.messages import Int32Array, JsonValue

_INT_KEY_MIN, _INT_KEY_MAX = -(2**63), 2**64 - 1

_Decoder = Callable[[Any], Any]


class Mismatch(Exception):
    """A value that does not fit its type; ``path`` is filled in on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def under(self, part: str) -> Mismatch:
        self.path = part + (self.path if self.path.startswith("[") or not self.path else "." + self.path)
        return self


def expected(what: str, value: object) -> Mismatch:
    return Mismatch(f"expected {what}, got {'null' if value is None else type(value).__name__}")


# -- decoders ---------------------------------------------------------------------------------------------------------
def _decode_int(value: Any) -> int:
    if type(value) is int:
        return value
    raise expected("int", value)


def _decode_float(value: Any) -> float:
    # orjson reads no NaN or Infinity, but an integer literal beyond 64 bits comes out as a float.
    if type(value) is float or type(value) is int:
        number = float(value)
        if isfinite(number):
            return number
        raise Mismatch("expected a finite number")
    raise expected("number", value)


def _decode_str(value: Any) -> str:
    if type(value) is str:
        return value
    raise expected("string", value)


def _decode_bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise expected("bool", value)


def _decode_none(value: Any) -> None:
    if value is not None:
        raise expected("null", value)


def _decode_json(value: Any) -> JsonValue:
    return cast(JsonValue, value)


def _literal_decoder(choices: tuple[Any, ...]) -> _Decoder:
    allowed = {(type(choice), choice) for choice in choices}

    def decode(value: Any) -> Any:
        kind = type(value)
        if kind in (str, int, bool) and (kind, value) in allowed:
            return value
        raise Mismatch(f"expected one of {', '.join(map(repr, choices))}")

    return decode


def _union_decoder(options: tuple[Any, ...]) -> _Decoder:
    optional = types.NoneType in options
    decoders = [_decoder_of(option) for option in options if option is not types.NoneType]
    if len(decoders) == 1:
        only = decoders[0]
        return lambda value: None if value is None else only(value)

    def decode(value: Any) -> Any:
        if value is None and optional:
            return None
        reasons = []
        for decoder in decoders:
            try:
                return decoder(value)
            except Mismatch as mismatch:
                reasons.append(str(mismatch))
        raise Mismatch(" or ".join(reasons))

    return decode


def _tuple_decoder(item_hint: Any) -> _Decoder:
    item = _decoder_of(item_hint)

    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise expected("list", value)
        done: list[Any] = []
        try:
            for entry in value:
                done.append(item(entry))  # not a comprehension: its length names the bad item
        except Mismatch as mismatch:
            raise mismatch.under(f"[{len(done)}]") from None
        return tuple(done)

    return decode


def _decode_int_key(key: str) -> int:
    digits = key[1:] if key.startswith("-") else key
    if len(digits) <= 20 and digits.isascii() and digits.isdigit():
        number = int(key)
        if _INT_KEY_MIN <= number <= _INT_KEY_MAX and str(number) == key:
            return number
    raise Mismatch("expected an integer key")


def _dict_decoder(key_hint: Any, item_hint: Any) -> _Decoder:
    decode_key = _decode_int_key if key_hint is int else _decode_str
    item = _decoder_of(item_hint)

    def decode(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise expected("object", value)
        done: dict[Any, Any] = {}
        for key, entry in value.items():
            try:
                done[decode_key(key)] = item(entry)
            except Mismatch as mismatch:
                raise mismatch.under(f"[{key!r:.40}]") from None
        return done

    return decode


def _dataclass_decoder(cls: type) -> _Decoder:
    layout = layout_of(cls)
    if layout.arrays:
        raise TypeError(f"{cls.__name__} is nested, so it cannot hold arrays")

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise expected("object", value)
        return cls(**layout.decode_header(value))

    return decode


_SCALARS: dict[Any, _Decoder] = {
    int: _decode_int,
    float: _decode_float,
    str: _decode_str,
    bool: _decode_bool,
    types.NoneType: _decode_none,
    object: _decode_json,
}


def _decoder_of(hint: Any) -> _Decoder:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal_decoder(args)
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _tuple_decoder(args[0])
    if origin is dict and args[0] in (str, int):
        return _dict_decoder(*args)
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass_decoder(hint)
    raise TypeError(f"bus messages cannot hold {hint!r}")


# -- layouts ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Layout:
    """How the fields of a dataclass lie in a frame. ``required`` ones have no default; the values of ``scalars`` are
    had by one ``get``, and not sent where they equal what stands in ``defaults``."""

    cls: type
    decoders: Mapping[str, _Decoder]
    scalars: tuple[str, ...]
    defaults: tuple[Any, ...]
    get: Callable[[Any], tuple[Any, ...]]
    required: tuple[str, ...]
    arrays: Mapping[bytes, str]
    """Field names by their keys in a frame. All have a default: an empty array is not sent."""

    def encode_header(self, message: Any) -> dict[str, Any]:
        header = {}
        for name, value, default in zip(self.scalars, self.get(message), self.defaults, strict=True):
            if value is not default and value != default:
                header[name] = value  # not a comprehension, which would be a call more on Python 3.11
        return header

    def decode_header(self, header: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        name, decoders = "", self.decoders
        try:
            for name, raw in header.items():
                if (decoder := decoders.get(name)) is not None:
                    values[name] = decoder(raw)
            for name in self.required:
                if name not in values:
                    raise Mismatch("is missing")
        except Mismatch as mismatch:
            raise mismatch.under(name) from None
        return values


LAYOUTS: dict[type, Layout] = {}
"""Of all classes that :func:`layout_of` was asked for, and those nested in them."""


def layout_of(cls: type) -> Layout:
    """The layout of a dataclass, built once.

    Raises:
        TypeError: a field has a type that messages cannot hold.
    """
    layout = LAYOUTS.get(cls)
    if layout is not None:
        return layout
    hints = get_type_hints(cls)
    arrays = [item for item in fields(cls) if hints[item.name] == Int32Array]
    scalars = [item for item in fields(cls) if hints[item.name] != Int32Array]
    layout = Layout(
        cls,
        decoders={item.name: _decoder_of(hints[item.name]) for item in scalars},
        scalars=tuple(item.name for item in scalars),
        defaults=tuple(map(_default_of, scalars)),
        get=_getter([item.name for item in scalars]),
        required=tuple(item.name for item in scalars if _default_of(item) is MISSING),
        arrays={item.name.encode(): item.name for item in arrays},
    )
    LAYOUTS[cls] = layout
    return layout


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All these attributes of an object, in one call where there are several."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
