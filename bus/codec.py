"""Frames: one message as the fields of one stream entry, and back.

A frame is ``{b"h": header, b"<array field>": raw, ...}``. The header is JSON, ``{"v": 1, "t": "StepPlan", ...fields}``;
each non-empty :data:`Int32Array` field travels beside it as raw little-endian int32. Fields with their default values,
as most of a request's are, are left out. Unknown fields are ignored and missing ones take their defaults, so two
versions can read each other; a default is part of the format.

What comes from the bus is untrusted: every value is checked against the type hints of :mod:`bus.messages` (in
:mod:`bus.layouts`), and anything that does not fit raises :class:`CodecError` with the path of the field. Decoded
messages share nothing mutable with the frame: arrays are read-only views of its bytes.

Messages that other programs write or read (``PLAIN_MESSAGES``) have no header: their fields, all of them text, are the
fields of the entry, and the first one tells which message it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np
import orjson

from bus.contract import CodecError
from bus.layouts import LAYOUTS, Layout, Mismatch, expected, layout_of
from bus.messages import PLAIN_MESSAGES, Int32Array, JsonValue, Message
from bus.messages.field_types import no_ints

VERSION = 1
HEADER = b"h"

_INT32 = np.dtype("<i4")
_ENCODE_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS

Frame = dict[bytes, bytes]

_BY_NAME: dict[str, Layout] = {cls.__name__: layout_of(cls) for cls in get_args(Message) if cls not in PLAIN_MESSAGES}
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
    layout = LAYOUTS.get(cls)
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
    if (layout := LAYOUTS.get(type(value))) is None:  # those of all that a message can hold are known by now
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
    except Mismatch as mismatch:
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


def _open_header(frame: Mapping[bytes, bytes]) -> tuple[dict[str, Any], Layout]:
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
        raise expected("bytes", raw)
    if len(raw) % 4:
        raise Mismatch(f"expected int32 values, got {len(raw)} bytes, which is not a multiple of 4")
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
