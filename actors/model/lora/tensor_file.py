"""``adapter_model.safetensors``: its header, read strictly, and its numbers, looked at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from pagebus.actors.model.lora.errors import AdapterError

MOST_HEADER_BYTES = 16 << 20
FORMATS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Of each number format: its bits as whole numbers, and those of the exponent, all set in what is not finite."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the file: its number format and shape, and from which byte to which it lies there."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file, by name, which fill it exactly.

    Raises:
        AdapterError: it is no whole safetensors file, or has a number format that is not read.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("the header is longer than the file, or than 16 MiB")
            header = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
        header.pop("__metadata__", None)
        tensors = [_tensor(name, entry, 8 + length) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{file.name} is not a whole safetensors file: {error}") from error
    place = 8 + length
    for tensor in sorted(tensors, key=lambda each: (each.start, each.end)):
        if tensor.start != place:
            raise AdapterError(f"{file.name}: tensor {tensor.name} does not begin where the one before it ends")
        place = tensor.end
    if place != size:
        raise AdapterError(f"{file.name} has {size} bytes, its header says {place}: it is not complete")
    return {tensor.name: tensor for tensor in tensors}


def raw_tensors(file: Path, tensors: Iterator[FileTensor]) -> Iterator[tuple[FileTensor, bytearray]]:
    """The bytes of tensors, one after the other, each in memory of its own.

    Raises:
        AdapterError: the file has changed, or a number is not finite.
    """
    try:
        with file.open("rb") as stream:
            for tensor in tensors:
                stream.seek(tensor.start)
                raw = bytearray(tensor.end - tensor.start)
                if stream.readinto(raw) != len(raw):
                    raise AdapterError(f"{file.name} has become shorter")
                _check_finite(tensor, raw)
                yield tensor, raw
    except OSError as error:
        raise AdapterError(f"{file.name} cannot be read: {error.strerror}") from error


def _check_finite(tensor: FileTensor, raw: bytearray) -> None:
    kind, exponent = FORMATS[tensor.format]
    bits: npt.NDArray[np.unsignedinteger] = np.frombuffer(raw, kind)
    if bool(np.any((bits & kind(exponent)) == exponent)):
        raise AdapterError(f"tensor {tensor.name} holds NaN or infinity")


def _tensor(name: str, entry: dict[str, object], base: int) -> FileTensor:
    form, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if form not in FORMATS:
        raise AdapterError(f"tensor {name} has number format {form}; only {', '.join(FORMATS)} are read")
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name}: shape and offsets must be whole numbers")
    start, end = offsets
    num_bytes = math.prod(shape) * np.dtype(FORMATS[str(form)][0]).itemsize
    if end - start != num_bytes:
        raise ValueError(f"tensor {name} has {end - start} bytes, its shape asks for {num_bytes}")
    return FileTensor(name, str(form), tuple(shape), base + start, base + end)


def _whole(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(each) is int and 0 <= each < 2**48 for each in values)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
