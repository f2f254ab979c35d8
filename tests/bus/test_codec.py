"""Frames: round trips of every message, and refusal of everything that is not one."""

from __future__ import annotations

import typing
from typing import Any, get_args, get_type_hints

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pagebus.bus import codec
from pagebus.bus.contract import CodecError
from pagebus.bus.messages import (
    AbortRequest,
    GenerateRequest,
    Int32Array,
    Message,
    NewSequence,
    ReplyBatch,
    SamplingParams,
    SequenceEnded,
    StepPlan,
    TokenizedRequest,
)
from pagebus.bus.messages.record import Record
from tests.grids import examples

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARRAYS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(lambda items: np.array(items, np.int32))


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field of this type."""
    if hint == Int32Array:
        return ARRAYS
    simple = {int: INT64, float: FLOAT, str: TEXT, bool: st.booleans(), type(None): st.none(), object: JSON}
    if hint in simple:
        return simple[hint]
    origin, args = typing.get_origin(hint), get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(strategy_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy_of(args[0]), strategy_of(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Record):
        return instances(hint)
    return st.one_of([strategy_of(option) for option in args])


def instances(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a record with every field drawn from its type."""
    return st.builds(cls, **{name: strategy_of(hint) for name, hint in get_type_hints(cls).items()})


def plain(value: Any) -> Any:
    """Something comparable by ==, arrays as lists."""
    if isinstance(value, Record):
        return {name: plain(each) for name, each in structs.asdict(value).items()}
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def frame_of(message_type: str, **header: Any) -> dict[bytes, bytes]:
    version = next((each for cls, each in codec.VERSIONS.items() if cls.__name__ == message_type), 1)
    return {b"h": orjson.dumps({"v": version, "t": message_type, **header})}


PLAN: dict[str, Any] = {"step": 1, "planned_s": 0.5, "num_decodes": 0}


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of([instances(cls) for cls in get_args(Message)]))
def test_round_trip(message: Message) -> None:
    """Every message comes back equal, of the same type, with int32 arrays."""
    again = codec.decode(codec.encode(message))
    assert type(again) is type(message)
    assert plain(again) == plain(message)


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(st.sampled_from([b"h", b"slots", b"x"]) | st.binary(max_size=4), st.binary(max_size=40)))
def test_random_fields_raise_codec_error_only(frame: dict[bytes, bytes]) -> None:
    """Random bytes are refused with CodecError and nothing else."""
    with pytest.raises(CodecError):
        codec.decode(frame)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(get_args(Message)),
    st.data(),
)
def test_random_headers_raise_codec_error_only(cls: type[Record], data: st.DataObject) -> None:
    """A header with the right names and random values decodes or is refused with CodecError, never anything else."""
    names = cls.__struct_fields__
    header = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    arrays = data.draw(st.dictionaries(st.sampled_from(names).map(str.encode), st.binary(max_size=9)))
    try:
        message = codec.decode(frame_of(cls.__name__, **header) | arrays)
    except CodecError:
        return
    assert type(message) is cls


@settings(max_examples=examples(200), deadline=None)
@given(instances(StepPlan), st.data())
def test_damaged_frames_raise_codec_error_only(plan: StepPlan, data: st.DataObject) -> None:
    """A frame with one byte changed decodes or is refused with CodecError, never anything else."""
    frame = codec.encode(plan)
    key = data.draw(st.sampled_from(sorted(frame)))
    raw = bytearray(frame[key])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(frame | {key: bytes(raw)})
    except CodecError:
        return


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ({}, "field 'h' is missing"),
        ({b"h": b"{"}, "not a JSON object"),
        ({b"h": b"[]"}, "not a JSON object"),
        ({b"h": b"[" * 5000}, "not a JSON object"),
        ({b"h": b'{"v": 1, "t": "StepPlan"}'}, "StepPlan of version 1 is unknown: this process reads version 3"),
        ({b"h": b'{"v": 2, "t": "StepResult"}'}, "version 2 is unknown: this process reads version 1"),
        ({b"h": b'{"v": true, "t": "StepPlan"}'}, "version True is unknown"),
        ({b"h": b'{"t": "StepPlan"}'}, "version None is unknown"),
        ({b"h": b'{"v": 1, "t": "Nonsense"}'}, "type 'Nonsense' is unknown"),
        ({b"h": b'{"v": 1, "t": ["x"]}'}, "is unknown"),
        (frame_of("NewSequence"), "type 'NewSequence' is unknown"),
        (frame_of("StepPlan"), "StepPlan: Object missing required field `step`"),
        (frame_of("StepPlan", **PLAN | {"step": "1"}), r"StepPlan: Expected `int`, got `str` - at `\$\.step`"),
        (frame_of("StepPlan", **PLAN | {"step": True}), r"StepPlan: Expected `int`, got `bool` - at `\$\.step`"),
        (frame_of("StepPlan", **PLAN | {"step": None}), r"StepPlan: Expected `int`, got `null` - at `\$\.step`"),
        (
            frame_of("StepPlan", **PLAN | {"planned_s": "x"}),
            r"Expected `float`, got `str` - at `\$\.planned_s`",
        ),
        (frame_of("StepPlan", **PLAN) | {b"slots": b"12345"}, r"StepPlan.slots: .*5 bytes, .*not a multiple of 4"),
        (
            frame_of("StepPlan", **PLAN, new_sequences={}),
            r"Expected `array`, got `object` - at `\$\.new_sequences`",
        ),
        (
            frame_of("StepPlan", **PLAN, new_sequences=[{}]),
            r"required field `sequence_id` - at `\$\.new_sequences\[0\]`",
        ),
        (
            frame_of("SequenceEnded", sequence_id=1, reason="bored"),
            r"Invalid enum value .bored. - at `\$\.reason`",
        ),
        (frame_of("AbortRequest", request_id=7), r"AbortRequest: Expected `str`, got `int` - at `\$\.request_id`"),
        (
            frame_of("TokenizedRequest", request_id="r", ingress="i", sampling={"logit_bias": {"1.5": 1.0}}),
            r"Expected `int`, got `str` - at `key` in `\$\.sampling\.logit_bias`",
        ),
        (
            frame_of("TokenizedRequest", request_id="r", ingress="i", sampling={"stop": ["a", 5]}),
            r"Expected `str`, got `int` - at `\$\.sampling\.stop\[1\]`",
        ),
        (
            frame_of("ReplyBatch", request_ids=[], texts=[], finish_reasons=[], stop_reasons=[1.5]),
            r"Expected `int \| str \| null`, got `float` - at `\$\.stop_reasons\[0\]`",
        ),
        ({b"h": b'{"v":3,"t":"StepPlan","step":1,"planned_s":1e999,"num_decodes":0}'}, "out of range"),
        ({b"h": b'{"v":3,"t":"StepPlan","step":1,"planned_s":NaN,"num_decodes":0}'}, "JSON"),
        (
            {b"h": b'{"v":3,"t":"StepPlan","step":1,"planned_s":1,"num_decodes":0.0}'},
            "int",
        ),
    ],
)
def test_refusals_name_the_field(frame: dict[bytes, bytes], text: str) -> None:
    """What is wrong with a frame is said with the path of the field."""
    with pytest.raises(CodecError, match=text):
        codec.decode(frame)


def test_missing_fields_take_defaults_and_unknown_ones_are_ignored() -> None:
    """A frame of an older or newer version is readable."""
    message = codec.decode(frame_of("AbortRequest", request_id="r", colour="red") | {b"future": b"123"})
    assert message == AbortRequest(request_id="r")


def test_integers_have_no_bound_of_their_own() -> None:
    """Whoever uses an integer checks its range."""
    message = SequenceEnded(sequence_id=2**70, reason="stop")
    assert codec.decode(codec.encode(message)) == message


def test_array_fields_are_never_read_from_the_header() -> None:
    """A list where an array belongs beside the header is refused."""
    with pytest.raises(CodecError, match=r"StepPlan: .* - at `\$\.slots`"):
        codec.decode(frame_of("StepPlan", **PLAN, slots=[1, 2]))


def test_what_nobody_asked_for_is_not_sent() -> None:
    """Fields with their defaults are left out, in nested objects too; what is 0 or false where that is not the default
    travels."""
    sampling = SamplingParams(max_tokens=4, temperature=0.0, skip_special_tokens=False)
    request = GenerateRequest(request_id="r", ingress="i", sampling=sampling)
    header = orjson.loads(codec.encode(request)[b"h"])
    assert header == {
        "v": 1,
        "t": "GenerateRequest",
        "request_id": "r",
        "ingress": "i",
        "sampling": {"max_tokens": 4, "temperature": 0.0, "skip_special_tokens": False},
    }


def test_empty_arrays_are_not_sent() -> None:
    """Only the header and the arrays that hold something travel."""
    plan = StepPlan(step=1, planned_s=0.0, num_decodes=0, freed_slots=np.array([1, -2], np.int32))
    frame = codec.encode(plan)
    assert set(frame) == {b"h", b"freed_slots"}
    assert frame[b"freed_slots"] == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def test_decoded_arrays_are_read_only() -> None:
    """Arrays are views of the frame that nobody can change."""
    frame = codec.encode(StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=np.arange(3, dtype=np.int32)))
    message = codec.decode(frame)
    assert isinstance(message, StepPlan)
    assert not message.slots.flags.writeable


def test_strided_arrays_travel_by_value() -> None:
    """An array that is a strided view is written element by element."""
    plan = StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=np.arange(10, dtype=np.int32)[::3])
    again = codec.decode(codec.encode(plan))
    assert isinstance(again, StepPlan)
    assert again.slots.tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("bad", [np.arange(3), np.zeros((2, 2), np.int32), [1, 2], np.zeros(3, np.float32)])
def test_wrong_arrays_are_not_encoded(bad: Any) -> None:
    """An array field that is not one-dimensional int32 is a mistake of the sender, named."""
    with pytest.raises(CodecError, match=r"StepPlan\.slots: expected a one-dimensional int32 array"):
        codec.encode(StepPlan(step=1, planned_s=0.0, num_decodes=0, slots=bad))


@pytest.mark.parametrize(
    "message",
    [
        SamplingParams(),
        AbortRequest(request_id="\ud800"),
        SequenceEnded(sequence_id=typing.cast(int, object()), reason="stop"),
        "text",
    ],
)
def test_what_cannot_be_encoded(message: Any) -> None:
    """A class that is no message, or a value JSON cannot hold, is refused."""
    with pytest.raises(CodecError):
        codec.encode(message)


def test_integer_keys_and_nested_records() -> None:
    """Token ids as dict keys and nested sequences come back as what they were."""
    new = NewSequence(
        sequence_id=1, slot=0, num_tokens=3, num_prompt_tokens=3, num_computed_tokens=0, num_blocks=1,
        max_total_tokens=9, seed=2**64 - 1, end_token_ids=(2, 3),
        sampling=SamplingParams(temperature=0, logit_bias={5: -100.0, 31999: 1.5}),
    )  # fmt: skip
    again = codec.decode(codec.encode(StepPlan(step=1, planned_s=0.0, num_decodes=0, new_sequences=(new, new))))
    assert isinstance(again, StepPlan)
    assert again.new_sequences == (new, new)
    assert type(again.new_sequences[0].sampling.temperature) is float


def test_messages_and_reasons_keep_their_shape() -> None:
    """Chat messages stay JSON lists inside a tuple; optional and mixed fields keep their types."""
    chat = ({"role": "user", "content": [{"type": "text", "text": "hi"}]},)
    request = GenerateRequest(request_id="r", ingress="i", sampling=SamplingParams(stop=("a",)), messages=chat)
    again = codec.decode(codec.encode(request))
    assert isinstance(again, GenerateRequest)
    assert again.messages == chat
    assert again.prompt is None
    batch = ReplyBatch(
        request_ids=("a", "b", "c"),
        texts=("x", "y", "z"),
        finish_reasons=(None, "stop", "length"),
        stop_reasons=(None, "\n", 7),
    )
    assert plain(codec.decode(codec.encode(batch))) == plain(batch)


def test_token_arrays_of_a_request_are_optional() -> None:
    """A request without token ids has empty arrays."""
    again = codec.decode(codec.encode(TokenizedRequest(request_id="r", ingress="i", sampling=SamplingParams())))
    assert isinstance(again, TokenizedRequest)
    assert again.prompt_token_ids.size == 0
    assert again.block_hashes.dtype == np.int32


@pytest.mark.parametrize("raw", [b"", b"[1]", b"7", b"{", b'{"a": NaN}'])
def test_bad_state_is_refused(raw: bytes) -> None:
    """State that is not a JSON object raises CodecError."""
    with pytest.raises(CodecError):
        codec.decode_state(raw)


def test_state_round_trip() -> None:
    """State is a JSON object; what is no JSON is refused."""
    assert codec.decode_state(codec.encode_state({"a": {"b": [1, None]}})) == {"a": {"b": [1, None]}}
    with pytest.raises(CodecError):
        codec.encode_state({"a": object()})
