"""Encodes a message as the fields of one stream entry, a frame, and decodes it.

A frame is ``{b"h": header, b"<array field>": raw, ...}``. The header is JSON, ``{"t": "StepPlan", "v": 3, ...fields}``;
each non-empty :data:`Int32Array` field travels beside it as raw little-endian int32. Fields that have their default
values, as most of a request's do, are omitted. Unknown fields are ignored and missing ones take their defaults, so two
versions can read each other: a default is part of the format. Any other change of a message increments its version
(:data:`VERSIONS`); a reader of another version raises an error instead of misreading it.

Data from the bus is untrusted. msgspec checks every value against the type hints of :mod:`pagebus.bus.messages`, and
anything that does not fit raises :class:`CodecError` with the path of the field. Decoded messages share nothing mutable
with the frame: arrays are read-only views of its bytes.

Messages that other programs write or read (``PLAIN_MESSAGES``) have no header. All their fields are text and become the
fields of the entry; the first one names the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import orjson
from msgspec import NODEFAULT, DecodeError, Struct, defstruct
from msgspec import field as field_with
from msgspec.json import Decoder, Encoder
from msgspec.structs import FieldInfo, fields, force_setattr

from pagebus.bus.contract import CodecError, Entry, EntryId
from pagebus.bus.messages import PLAIN_MESSAGES, Int32Array, JsonValue, Message, SequenceStarted, StepPlan
from pagebus.bus.messages.field_types import NO_INTS
from pagebus.bus.messages.record import Record

VERSIONS: Mapping[type, int] = {StepPlan: 3, SequenceStarted: 2}
"""The version of each message that has changed; 1 where it is not named. 2: sampling parameters travel as one
object. 3: a plan may leave out the first tokens of a sequence."""
HEADER = b"h"

_INT32 = np.dtype("<i4")

Frame = dict[bytes, bytes]


# -- how each message lies in a frame ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a message in a frame: ``arrays`` beside the header, by their keys; the other fields in it."""

    cls: type[Record]
    version: int
    arrays: Mapping[bytes, str]
    header: Callable[..., Struct]
    """Builds the header of a message from its version and the values that ``get`` reads from it."""
    get: Callable[[Any], tuple[Any, ...]]
    decode: Callable[[bytes], Record]
    """The message of a header, without its arrays."""


class _Opening(Struct):
    """The part of a header that tells how to decode the rest."""

    v: Any = None
    t: Any = None


def _layout_of(cls: type[Record]) -> _Layout:
    hints = get_type_hints(cls)
    required_first = sorted(fields(cls), key=lambda each: not each.required)
    scalars = [each for each in required_first if hints[each.name] != Int32Array]
    header = defstruct(
        cls.__name__,
        [("v", int), *map(_header_field, scalars)],
        tag_field="t",
        tag=cls.__name__,
        omit_defaults=True,
    )
    arrays = {name.encode(): name for name, hint in hints.items() if hint == Int32Array}
    get = _getter([each.name for each in scalars])
    return _Layout(cls, VERSIONS.get(cls, 1), arrays, header, get, Decoder(cls).decode)


def _header_field(spec: FieldInfo) -> tuple[str, Any] | tuple[str, Any, Any]:
    """A field of a message's header. It needs no type: encoding does not use one, and decoding checks the message's."""
    if spec.required:
        return (spec.name, Any)
    factory = spec.default_factory
    return (spec.name, Any, spec.default if factory is NODEFAULT else field_with(default_factory=factory))


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter of these attributes, in one call where there are several."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


_LAYOUTS: dict[type, _Layout] = {cls: _layout_of(cls) for cls in get_args(Message) if cls not in PLAIN_MESSAGES}
_BY_NAME: dict[str, _Layout] = {cls.__name__: layout for cls, layout in _LAYOUTS.items()}
_PLAIN: dict[bytes, type[Record]] = {cls.__struct_fields__[0].encode(): cls for cls in PLAIN_MESSAGES}

_encode_header = Encoder().encode
_decode_opening = Decoder(_Opening).decode


# -- frames -----------------------------------------------------------------------------------------------------------
def encode(message: Message) -> Frame:
    """The frame of a message.

    Raises:
        CodecError: a value JSON cannot hold (a lone surrogate), or an array field that is not a one-dimensional int32
            array.
    """
    cls = type(message)
    layout = _LAYOUTS.get(cls)
    if layout is None:
        if cls in PLAIN_MESSAGES:
            return _encode_plain(message)
        raise CodecError(f"{cls.__name__} is not a bus message: use a class of bus/messages")
    try:
        frame = {HEADER: _encode_header(layout.header(layout.version, *layout.get(message)))}
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"{cls.__name__} cannot be encoded: {error}") from error
    for key, name in layout.arrays.items():
        array = getattr(message, name)
        if array is NO_INTS:
            continue
        if not isinstance(array, np.ndarray) or array.dtype != _INT32 or array.ndim != 1:
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise CodecError(f"{cls.__name__}.{name}: expected a one-dimensional int32 array, got {got}")
        if array.size:
            frame[key] = array.tobytes()
    return frame


def decode(frame: Mapping[bytes, bytes]) -> Message:
    """The message of a frame.

    Raises:
        CodecError: not a frame of ours, of an unknown version or type, or with a field of a wrong type (named).
    """
    raw = frame.get(HEADER)
    if raw is None:
        if (cls := next((_PLAIN[key] for key in _PLAIN if key in frame), None)) is not None:
            return _decode_plain(cls, frame)
        raise CodecError("not a Pagebus frame: field 'h' is missing")
    layout = _layout_in(raw)
    try:
        message = layout.decode(raw)
    except (DecodeError, TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"{layout.cls.__name__}: {error!s:.300}") from None
    for key, array in frame.items():
        if (name := layout.arrays.get(key)) is not None:
            force_setattr(message, name, _decode_array(layout.cls, name, array))  # not shared yet
    return cast(Message, message)


def entry_of(stream: str, entry_id: EntryId, frame: Mapping[bytes, bytes], deliveries: int = 1) -> Entry:
    """The entry of a stored frame; if it cannot be decoded, the entry says why."""
    try:
        return Entry(stream, entry_id, decode(frame), deliveries, raw=frame)
    except CodecError as error:
        return Entry(stream, entry_id, None, deliveries, str(error), frame)


def _layout_in(header: bytes) -> _Layout:
    try:
        opening = _decode_opening(header)
    except (DecodeError, TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"not a Pagebus frame: field 'h' is not a JSON object ({error})") from None
    version, name = opening.v, opening.t
    layout = _BY_NAME.get(name) if type(name) is str else None
    if layout is None:
        raise CodecError(f"message type {name!r:.80} is unknown")
    if type(version) is not int or version != layout.version:
        raise CodecError(f"{name} of version {version!r:.40} is unknown: this process reads version {layout.version}")
    return layout


def _decode_array(cls: type, name: str, raw: bytes) -> Int32Array:
    if type(raw) is not bytes:
        raise CodecError(f"{cls.__name__}.{name}: expected bytes, got {type(raw).__name__}")
    if len(raw) % 4:
        size = f"{len(raw)} bytes, which is not a multiple of 4"
        raise CodecError(f"{cls.__name__}.{name}: expected int32 values, got {size}")
    return np.frombuffer(raw, _INT32)


# -- messages without a header ----------------------------------------------------------------------------------------
def _encode_plain(message: Message) -> Frame:
    try:
        texts = {name.encode(): getattr(message, name).encode() for name in message.__struct_fields__}
    except UnicodeEncodeError as error:
        raise CodecError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return {name: text for place, (name, text) in enumerate(texts.items()) if text or place == 0}


def _decode_plain(cls: type[Record], frame: Mapping[bytes, bytes]) -> Message:
    values = {}
    for name in cls.__struct_fields__:
        try:
            if (raw := frame.get(name.encode())) is not None:
                values[name] = raw.decode()
        except UnicodeDecodeError:
            raise CodecError(f"{cls.__name__}.{name}: expected UTF-8 text") from None
    return cast(Message, cls(**values))


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
        raise CodecError(f"state is not JSON: {error!s:.300}") from None
    if type(value) is not dict:
        raise CodecError("state is not a JSON object")
    return cast(dict[str, JsonValue], value)
