"""Frames: one message as the fields of one stream entry, and back.

A frame is ``{b"h": header, b"<array field>": raw, ...}``. The header is JSON, ``{"v": 1, "t": "StepPlan", ...fields}``;
each non-empty :data:`Int32Array` field travels beside it as raw little-endian int32. Fields with their default values,
as most of a request's are, are left out. Unknown fields are ignored and missing ones take their defaults, so two
versions can read each other; a default is part of the format.

What comes from the bus is untrusted: every value is checked against the type hints of :mod:`bus.messages`, and anything
that does not fit raises :class:`CodecError` with the path of the field. Decoded messages share nothing mutable with the
frame: arrays are read-only views of its bytes.

Messages that other programs write or read (``PLAIN_MESSAGES``) have no header: their fields, all of them text, are the
fields of the entry, and the first one tells which message it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import orjson

from bus.contract import CodecError
from bus.messages import PLAIN_MESSAGES, Int32Array, JsonValue, Message
from bus.messages.field_types import no_ints

VERSION = 1
HEADER = b"h"

_INT32 = np.dtype("<i4")
_ENCODE_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
_INT_KEY_MIN, _INT_KEY_MAX = -(2**63), 2**64 - 1

Frame = dict[bytes, bytes]
_Decoder = Callable[[Any], Any]


class _Mismatch(Exception):
    """A value that does not fit its type; ``path`` is filled in on the way up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def under(self, part: str) -> _Mismatch:
        self.path = part + (self.path if self.path.startswith("[") or not self.path else "." + self.path)
        return self


def _expected(what: str, value: object) -> _Mismatch:
    return _Mismatch(f"expected {what}, got {'null' if value is None else type(value).__name__}")


# -- decoders, built once per type hint -------------------------------------------------------------------------------
def _decode_int(value: Any) -> int:
    if type(value) is int:
        return value
    raise _expected("int", value)


def _decode_float(value: Any) -> float:
    # orjson reads no NaN or Infinity, but an integer literal beyond 64 bits comes out as a float.
    if type(value) is float or type(value) is int:
        number = float(value)
        if isfinite(number):
            return number
        raise _Mismatch("expected a finite number")
    raise _expected("number", value)


def _decode_str(value: Any) -> str:
    if type(value) is str:
        return value
    raise _expected("string", value)


def _decode_bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _expected("bool", value)


def _decode_none(value: Any) -> None:
    if value is not None:
        raise _expected("null", value)


def _decode_json(value: Any) -> JsonValue:
    return cast(JsonValue, value)


def _literal_decoder(choices: tuple[Any, ...]) -> _Decoder:
    allowed = {(type(choice), choice) for choice in choices}

    def decode(value: Any) -> Any:
        kind = type(value)
        if kind in (str, int, bool) and (kind, value) in allowed:
            return value
        raise _Mismatch(f"expected one of {', '.join(map(repr, choices))}")

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
            except _Mismatch as mismatch:
                reasons.append(str(mismatch))
        raise _Mismatch(" or ".join(reasons))

    return decode


def _tuple_decoder(item_hint: Any) -> _Decoder:
    item = _decoder_of(item_hint)

    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _expected("list", value)
        done: list[Any] = []
        try:
            for entry in value:
                done.append(item(entry))  # not a comprehension: its length names the bad item
        except _Mismatch as mismatch:
            raise mismatch.under(f"[{len(done)}]") from None
        return tuple(done)

    return decode


def _decode_int_key(key: str) -> int:
    digits = key[1:] if key.startswith("-") else key
    if len(digits) <= 20 and digits.isascii() and digits.isdigit():
        number = int(key)
        if _INT_KEY_MIN <= number <= _INT_KEY_MAX and str(number) == key:
            return number
    raise _Mismatch("expected an integer key")


def _dict_decoder(key_hint: Any, item_hint: Any) -> _Decoder:
    decode_key = _decode_int_key if key_hint is int else _decode_str
    item = _decoder_of(item_hint)

    def decode(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _expected("object", value)
        done: dict[Any, Any] = {}
        for key, entry in value.items():
            try:
                done[decode_key(key)] = item(entry)
            except _Mismatch as mismatch:
                raise mismatch.under(f"[{key!r:.40}]") from None
        return done

    return decode


def _dataclass_decoder(cls: type) -> _Decoder:
    layout = _layout_of(cls)
    if layout.arrays:
        raise TypeError(f"{cls.__name__} is nested, so it cannot hold arrays")

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("object", value)
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


# -- one layout per class ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Layout:
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
                    raise _Mismatch("is missing")
        except _Mismatch as mismatch:
            raise mismatch.under(name) from None
        return values


_layouts: dict[type, _Layout] = {}


def _layout_of(cls: type) -> _Layout:
    layout = _layouts.get(cls)
    if layout is not None:
        return layout
    hints = get_type_hints(cls)
    arrays = [item for item in fields(cls) if hints[item.name] == Int32Array]
    scalars = [item for item in fields(cls) if hints[item.name] != Int32Array]
    layout = _Layout(
        cls,
        decoders={item.name: _decoder_of(hints[item.name]) for item in scalars},
        scalars=tuple(item.name for item in scalars),
        defaults=tuple(map(_default_of, scalars)),
        get=_getter([item.name for item in scalars]),
        required=tuple(item.name for item in scalars if _default_of(item) is MISSING),
        arrays={item.name.encode(): item.name for item in arrays},
    )
    _layouts[cls] = layout
    return layout


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All these attributes of an object, in one call where there are several."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


_BY_NAME: dict[str, _Layout] = {cls.__name__: _layout_of(cls) for cls in get_args(Message) if cls not in PLAIN_MESSAGES}
_PLAIN: dict[bytes, type] = {fields(cls)[0].name.encode(): cls for cls in PLAIN_MESSAGES}


# -- frames -----------------------------------------------------------------------------------------------------------
def encode(message: Message) -> Frame:
    """The frame of a message.

    Raises:
        CodecError: a value JSON cannot hold (an integer beyond 64 bits, a lone surrogate), or an array field that is
            not a one-dimensional int32 array.
    """
    cls = type(message)
    if cls in PLAIN_MESSAGES:
        return _encode_plain(message)
    layout = _layouts.get(cls)
    if layout is None or cls.__name__ not in _BY_NAME:
        raise CodecError(f"{cls.__name__} is not a bus message: use a class of bus/messages")
    header = {"v": VERSION, "t": cls.__name__, **layout.encode_header(message)}
    try:
        frame = {HEADER: orjson.dumps(header, _encode_nested, _ENCODE_OPTIONS)}
    except (TypeError, RecursionError) as error:
        raise CodecError(f"{cls.__name__} cannot be encoded: {error}") from error
    nothing = no_ints()
    for key, name in layout.arrays.items():
        array = getattr(message, name)
        if array is nothing:
            continue
        if not isinstance(array, np.ndarray) or array.dtype != _INT32 or array.ndim != 1:
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise CodecError(f"{cls.__name__}.{name}: expected a one-dimensional int32 array, got {got}")
        if array.size:
            frame[key] = array.tobytes()
    return frame


def _encode_nested(value: Any) -> dict[str, Any]:
    if (layout := _layouts.get(type(value))) is None:  # those of all that a message can hold are known by now
        raise TypeError(f"{type(value).__name__} cannot be sent")
    return layout.encode_header(value)


def decode(frame: Mapping[bytes, bytes]) -> Message:
    """The message of a frame.

    Raises:
        CodecError: not a frame of ours, of an unknown version or type, or with a field of a wrong type (named).
    """
    if HEADER not in frame and (cls := next((_PLAIN[key] for key in _PLAIN if key in frame), None)) is not None:
        return _decode_plain(cls, frame)
    header, layout = _open_header(frame)
    name = ""
    try:
        values = layout.decode_header(header)
        for key, raw in frame.items():
            if (name := layout.arrays.get(key, "")) != "":
                values[name] = _decode_array(raw)
    except _Mismatch as mismatch:
        path = mismatch.path or name
        raise CodecError(f"{layout.cls.__name__}.{path:.200}: {mismatch}") from None
    return cast(Message, layout.cls(**values))


def _encode_plain(message: Message) -> Frame:
    try:
        texts = {item.name.encode(): getattr(message, item.name).encode() for item in fields(message)}
    except UnicodeEncodeError as error:
        raise CodecError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return {name: text for place, (name, text) in enumerate(texts.items()) if text or place == 0}


def _decode_plain(cls: type, frame: Mapping[bytes, bytes]) -> Message:
    values = {}
    for item in fields(cls):
        try:
            if (raw := frame.get(item.name.encode())) is not None:
                values[item.name] = raw.decode()
        except UnicodeDecodeError:
            raise CodecError(f"{cls.__name__}.{item.name}: expected UTF-8 text") from None
    return cast(Message, cls(**values))


def _open_header(frame: Mapping[bytes, bytes]) -> tuple[dict[str, Any], _Layout]:
    raw = frame.get(HEADER)
    if raw is None:
        raise CodecError("not a Pagebus frame: field 'h' is missing")
    try:
        header = orjson.loads(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"not a Pagebus frame: field 'h' is not JSON ({error})") from None
    if type(header) is not dict:
        raise CodecError("not a Pagebus frame: field 'h' is not a JSON object")
    version, name = header.get("v"), header.get("t")
    if type(version) is not int or version != VERSION:
        raise CodecError(f"frame version {version!r:.40} is unknown: this process reads version {VERSION}")
    layout = _BY_NAME.get(name) if type(name) is str else None
    if layout is None:
        raise CodecError(f"message type {name!r:.80} is unknown")
    return header, layout


def _decode_array(raw: bytes) -> Int32Array:
    if type(raw) is not bytes:
        raise _expected("bytes", raw)
    if len(raw) % 4:
        raise _Mismatch(f"expected int32 values, got {len(raw)} bytes, which is not a multiple of 4")
    return np.frombuffer(raw, _INT32)


# -- small JSON objects -----------------------------------------------------------------------------------------------
def encode_state(value: Mapping[str, JsonValue]) -> bytes:
    """A small JSON object as bytes.

    Raises:
        CodecError: something in it is no JSON.
    """
    try:
        return orjson.dumps(dict(value), None, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, RecursionError) as error:
        raise CodecError(f"state cannot be encoded: {error}") from error


def decode_state(raw: bytes) -> dict[str, JsonValue]:
    """The JSON object in ``raw``.

    Raises:
        CodecError: it is not a JSON object.
    """
    try:
        value = orjson.loads(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"state is not JSON: {error}") from None
    if type(value) is not dict:
        raise CodecError("state is not a JSON object")
    return cast(dict[str, JsonValue], value)
