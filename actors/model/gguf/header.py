"""Reads the header of a GGUF file: keys of the model, and the places of its tensors.

The library ``gguf`` makes an array of every token, which takes seconds for a large vocabulary, and trusts all lengths.
Every actor reads the header at start, and a damaged file must end in one clear error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.types import REFUSED, TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMS = 4
SHAPE_LIMIT = 2**40
"""The most numbers of a tensor; no model comes near."""
MOST = 2**24
"""The largest count in a header: of tokens, of tensors, of the bytes of a text."""
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of struct by GGUF's kind of number."""
STRING, ARRAY = 8, 9
Value: TypeAlias = int | float | bool | str | list[Any]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its ``shape`` with outputs first, and the ``num_bytes`` from ``offset`` on in ``file``."""

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one model: ``metadata`` of its first file, and the tensors of all files, by name."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufFile:
    """The header of one file.

    Raises:
        ModelError: it is not a GGUF file, is damaged or cut off, or has tensors of a type that is not read.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


class _Reader:
    """Reads a header from its first byte on. Raises ValueError for what makes no sense."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._size = path, data, 0, len(data)
        self._where = "the beginning"

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported (only 2 and 3, little-endian)")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata = self._metadata(num_values)
        infos = self._infos(num_tensors)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        return GgufFile(self._path, metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(self._counted(count, 12)):
            self._where = "a key"
            key = self._string()
            self._where = key
            if key in found:
                raise ValueError(f"key {key} is there twice")
            found[key] = self._value(self._number("I"))
        return found

    def _infos(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        found = []
        for index in range(self._counted(count, 24)):
            self._where = f"the name of tensor {index}"
            name = self._string()
            self._where = f"tensor {name}"
            dims = self._number("I")
            if not 1 <= dims <= MAX_DIMS:
                raise ValueError(f"tensor {name} has {dims} dimensions")
            shape = tuple(self._number("Q") for _ in range(dims))[::-1]
            found.append((name, shape, self._number("I"), self._number("Q")))
        return found

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        known = TYPES.get(kind)
        if known is None:
            types = ", ".join(each.name for each in TYPES.values())
            raise ValueError(f"tensor {name} has type {REFUSED.get(kind, kind)}, which is not read (only {types})")
        if not all(0 < size < SHAPE_LIMIT for size in shape) or prod(shape) >= SHAPE_LIMIT:
            raise ValueError(f"tensor {name} has shape {list(shape)}")
        if shape[-1] % known.numbers:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} numbers, no whole blocks of {known.name}")
        num_bytes = prod(shape) // known.numbers * known.size
        if offset + num_bytes > self._size:
            raise ValueError(f"tensor {name} lies outside the file, which is perhaps not complete")
        return GgufTensor(name, known.name, shape, self._path, offset, num_bytes)

    def _value(self, kind: int) -> Value:
        if kind in CODES:
            value: Value = self._number(CODES[kind])
            return value
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        raise ValueError(f"{self._where} has a value of unknown kind {kind}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return [self._string() for _ in range(self._counted(count, 8))]
        if kind not in CODES:
            raise ValueError(f"{self._where} is an array of unknown kind {kind}")
        code = CODES[kind]
        count = self._counted(count, struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _counted(self, count: int, least_bytes: int) -> int:
        """``count``, if that many things fit into the rest of the file."""
        if count > MOST:
            raise ValueError(f"it has {count} parts in {self._where}")
        if count * least_bytes > self._size - self._at:
            raise ValueError(f"it ends in {self._where}")
        return count

    def _string(self) -> str:
        try:
            return self._take(self._counted(self._number("Q"), 1)).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._where} is no UTF-8") from error

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return value

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > self._size:
            self._at = start
            raise ValueError(f"it ends in {self._where}")
        return self._data[start : self._at]
