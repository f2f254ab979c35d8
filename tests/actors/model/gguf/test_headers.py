"""Headers of GGUF files: what they say, and that damaged ones end in one clear error."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.files import read_file
from pagebus.actors.model.gguf.header import read_header
from tests.grids import examples
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.gguf_files import uniform, write_gguf

KEYS: dict[str, Any] = {"a.flag": True, "a.text": "é 你", "a.count": 7, "a.share": 0.5, "a.list": ["x", "", "y"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    source = make_golden(folder / "model", "qwen2", {"intermediate_size": 128})
    return write_gguf(source, folder / "model.gguf", uniform(gguf.GGMLQuantizationType.Q8_0), KEYS)


def test_what_is_written_is_read(model: Path) -> None:
    """As the library reads it."""
    found, expected = read_header(model), gguf.GGUFReader(model)
    assert {key: found.metadata[key] for key in KEYS} == KEYS
    assert found.metadata["general.architecture"] == "qwen2"
    assert len(found.tensors) == len(expected.tensors)
    for each in expected.tensors:
        tensor = found.tensors[each.name]
        assert (tensor.shape, tensor.type) == (tuple(int(size) for size in each.shape[::-1]), each.tensor_type.name)
        assert (tensor.offset, tensor.num_bytes) == (each.data_offset, each.n_bytes)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_cut_off_file(model: Path, share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wherever it ends, that is said; behind the header a tensor is named."""
    data = model.read_bytes()
    part = tmp_path_factory.mktemp("cut") / "part.gguf"
    tensors = read_header(model).tensors.values()
    end = int(share * max(tensor.offset + tensor.num_bytes for tensor in tensors))
    part.write_bytes(data[:end])
    with pytest.raises(ModelError, match=r"part\.gguf is not a readable GGUF file: ") as raised:
        read_header(part)
    assert end < min(tensor.offset for tensor in tensors) or "tensor " in str(raised.value)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte(model: Path, place: float, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The configuration is read, or one error says why not."""
    data = bytearray(model.read_bytes())
    first = min(tensor.offset for tensor in read_header(model).tensors.values())
    data[int(first * place)] = byte
    file = tmp_path_factory.mktemp("changed") / "changed.gguf"
    file.write_bytes(data)
    with suppress(ModelError):
        assert ModelConfig.load(file).num_layers == 2


def with_number(data: bytes, key: str, value: bytes) -> bytes:
    """The file with other bytes behind the name of a key or of a tensor."""
    start = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
    return data[:start] + value + data[start + len(value) :]


DIMS = struct.pack("<IQQ", 2, 64, 307)
TENSOR = "token_embd.weight"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (TENSOR, struct.pack("<I", 9), rf"tensor {TENSOR} has 9 dimensions"),
        (TENSOR, struct.pack("<IQ", 2, 2**62), rf"tensor {TENSOR} has shape \[307, {2**62}\]"),
        (TENSOR, struct.pack("<IQ", 2, 0), rf"tensor {TENSOR} has shape \[307, 0\]"),
        (TENSOR, struct.pack("<IQ", 2, 33), rf"tensor {TENSOR} has rows of 33 numbers, no whole blocks of Q8_0"),
        (TENSOR, DIMS + struct.pack("<I", 10), rf"tensor {TENSOR} has type Q2_K, which is not read \(only F32, "),
        (TENSOR, DIMS + struct.pack("<I", 99), rf"tensor {TENSOR} has type 99, which is not read"),
        (TENSOR, DIMS + struct.pack("<IQ", 8, 2**63), rf"tensor {TENSOR} lies outside the file"),
        ("a.list", struct.pack("<IIQ", 9, 8, 2**60), rf"it has {2**60} parts in a\.list"),
        ("a.list", struct.pack("<IIQ", 9, 8, 10**6), r"it ends in a\.list"),
        ("a.list", struct.pack("<II", 9, 9), r"a\.list is an array of unknown kind 9"),
        ("a.count", struct.pack("<I", 77), r"a\.count has a value of unknown kind 77"),
        ("a.text", struct.pack("<IQ", 8, 2**50), rf"it has {2**50} parts in a\.text"),
        ("a.text", struct.pack("<IQB", 8, 6, 0xFF), r"a\.text is no UTF-8"),
    ],
)
def test_absurd_numbers(key: str, value: bytes, message: str, model: Path, tmp_path: Path) -> None:
    """What they are of is named."""
    file = tmp_path / "absurd.gguf"
    file.write_bytes(with_number(model.read_bytes(), key, value))
    with pytest.raises(ModelError, match=message):
        read_header(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGML" + bytes(40), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), r"it has \d+ parts"),
    ],
)
def test_other_files(data: bytes, message: str, tmp_path: Path) -> None:
    """None is read by mistake."""
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_header(tmp_path / "x.gguf")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    """The first has the keys; all have tensors."""
    source = make_golden(tmp_path / "model", "qwen2", {"intermediate_size": 128})
    whole = write_gguf(source, tmp_path / "whole.gguf", uniform(gguf.GGMLQuantizationType.F32))
    names = list(read_header(whole).tensors)
    reader = gguf.GGUFReader(whole)
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"part-0000{number}-of-00002.gguf", "qwen2")
        for each in reader.tensors[number - 1 :: 2]:
            writer.add_tensor(each.name, np.array(each.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = read_file(tmp_path / "part-00001-of-00002.gguf")
    assert sorted(found.tensors) == sorted(names)
    assert {tensor.file.name[5:10] for tensor in found.tensors.values()} == {"00001", "00002"}
    (tmp_path / "part-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"part-00002-of-00002\.gguf is not a readable GGUF file"):
        read_file(tmp_path / "part-00001-of-00002.gguf")


def test_a_later_part_is_no_model(model: Path, tmp_path: Path) -> None:
    """The first one is, and has the keys."""
    part = tmp_path / "m-00002-of-00003.gguf"
    part.write_bytes(model.read_bytes())
    with pytest.raises(
        ModelError, match=r"m-00002-of-00003\.gguf is part 2 of a model: name the first, m-00001-of-00003"
    ):
        read_file(part)


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    """Readers that take the first and readers that take the last would see two models."""
    one = struct.pack("<Q", 3) + b"a.b" + struct.pack("<II", 4, 7)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * one)
    with pytest.raises(ModelError, match=r"key a\.b is there twice"):
        read_header(tmp_path / "x.gguf")
