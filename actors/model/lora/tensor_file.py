"""``adapter_model.safetensors``: its header, read strictly, and its numbers, looked at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from pagebus.actors.model.lora.errors import AdapterError

Bytes = npt.NDArray[np.uint8]
MOST_HEADER_BYTES = 16 << 20
FORMATS: dict[str, tuple[type[np.unsignedinteger], type[np.signedinteger], int]] = {
    "F32": (np.uint32, np.int32, 0x7F800000),
    "F16": (np.uint16, np.int16, 0x7C00),
    "BF16": (np.uint16, np.int16, 0x7F80),
}
"""Of each number format: its bits as whole numbers, without and with a sign, and those of the exponent, all set in what
is not finite."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the file: its number format and shape, and from which byte to which it lies there."""

    name: str
    format: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class Header(NamedTuple):
    """The header of a file that has ``num_bytes`` in all."""

    file: str
    text: bytes
    num_bytes: int

    def tensors(self) -> dict[str, FileTensor]:
        """The tensors of the file, by name, which fill it exactly.

        Raises:
            AdapterError: it is no whole safetensors file, or has a number format that is not read.
        """
        place = 8 + len(self.text)
        try:
            entries = json.loads(self.text, object_pairs_hook=_without_repeats)
            entries.pop("__metadata__", None)
            tensors = [_tensor(name, entry, place) for name, entry in entries.items()]
        except AdapterError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _is_broken(self.file, error) from error
        for tensor in sorted(tensors, key=lambda each: (each.start, each.end)):
            if tensor.start != place:
                raise AdapterError(f"{self.file}: tensor {tensor.name} does not begin where the one before it ends")
            place = tensor.end
        if place != self.num_bytes:
            text = f"{self.file} has {self.num_bytes} bytes, its header says {place}: it is not complete"
            raise AdapterError(text)
        return {tensor.name: tensor for tensor in tensors}


def read_header(file: Path) -> Header:
    """The header of a file.

    Raises:
        AdapterError: there is none.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(MOST_HEADER_BYTES, size - 8):
                raise ValueError("the header is longer than the file, or than 16 MiB")
            return Header(file.name, stream.read(length), size)
    except (OSError, ValueError) as error:
        raise _is_broken(file.name, error) from error


class Numbers:
    """The bytes of some tensors of a file, one behind the other in memory."""

    def __init__(self, tensors: Sequence[FileTensor]) -> None:
        sizes = [each.end - each.start for each in tensors]
        self.raw: Bytes = np.empty(sum(sizes), np.uint8)
        ends = accumulate(sizes)
        self._places = {each.name: slice(end - size, end) for each, size, end in zip(tensors, sizes, ends, strict=True)}

    def of(self, *tensors: FileTensor) -> Bytes:
        """Those of neighbours with one number format, where such numbers may lie."""
        found = self.raw[self._places[tensors[0].name].start : self._places[tensors[-1].name].stop]
        return found if found.ctypes.data % np.dtype(FORMATS[tensors[0].format][0]).itemsize == 0 else found.copy()


def read_numbers(file: Path, tensors: Sequence[FileTensor]) -> Numbers:
    """The numbers of ``tensors``, which are in the order of the file.

    They are read, and looked at, in few calls: behind each, a thread waits for Python's lock, which steps may have.

    Raises:
        AdapterError: the file has changed, or a number is not finite.
    """
    numbers = Numbers(tensors)
    left = numbers.raw.data
    try:
        with file.open("rb", buffering=0) as stream:
            for start, end in _spans(tensors):
                stream.seek(start)
                wanted, left = left[: end - start], left[end - start :]
                while wanted:
                    count = stream.readinto(wanted)
                    if not count:
                        raise AdapterError(f"{file.name} has become shorter")
                    wanted = wanted[count:]
    except OSError as error:
        raise AdapterError(f"{file.name} cannot be read: {error.strerror}") from error
    for form, run in groupby(tensors, attrgetter("format")):
        _check_finite(form, list(run), numbers)
    return numbers


def in_parts(tensors: Sequence[FileTensor], part_bytes: int) -> Iterator[list[FileTensor]]:
    """Neighbours of at most ``part_bytes`` together, or one that is larger."""
    part: list[FileTensor] = []
    size = 0
    for each in tensors:
        size += each.end - each.start
        if part and size > part_bytes:
            yield part
            part, size = [], each.end - each.start
        part.append(each)
    yield part


def _spans(tensors: Sequence[FileTensor]) -> list[tuple[int, int]]:
    """From which byte to which neighbours lie in the file."""
    found: list[tuple[int, int]] = []
    for each in tensors:
        if found and found[-1][1] == each.start:
            found[-1] = found[-1][0], each.end
        else:
            found.append((each.start, each.end))
    return found


def _check_finite(form: str, tensors: Sequence[FileTensor], numbers: Numbers) -> None:
    if not _is_finite(form, numbers.of(*tensors)):
        broken = next(each for each in tensors if not _is_finite(form, numbers.of(each)))
        raise AdapterError(f"tensor {broken.name} holds NaN or infinity")


def _is_finite(form: str, raw: Bytes) -> bool:
    """Among positive numbers, those that are not finite are the largest as whole numbers with a sign; among negative
    ones, as whole numbers without."""
    unsigned, signed, exponent = FORMATS[form]
    highest = 1 << 8 * np.dtype(unsigned).itemsize - 1
    return bool(raw.view(signed).max(initial=0) < exponent and raw.view(unsigned).max(initial=0) < highest + exponent)


def _is_broken(file: str, error: Exception) -> AdapterError:
    return AdapterError(f"{file} is not a whole safetensors file: {error}")


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
