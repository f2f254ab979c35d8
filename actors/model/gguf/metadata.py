"""Reads the keys of a GGUF file one by one: each getter checks the value, and names the key that is wrong."""

from __future__ import annotations

import math
import struct
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile


class Metadata:
    """The keys of the file's architecture, without its name in front. All getters raise ModelError."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, unchecked."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def wrong(self, key: str, why: str) -> ModelError:
        """The error for a key."""
        return ModelError(f"{self.file.path}: {self.architecture}.{key} {why}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1 and below 2^31. In a list, with one number per layer, all must be equal."""
        value = self.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        values = value if isinstance(value, list) and value else [value]
        if any(type(each) is not int or not 1 <= each < 2**31 for each in values):
            raise self.wrong(key, f"is {_short(value)}, not a whole number of at least 1")
        if len(set(values)) > 1:
            raise self.wrong(key, "differs from layer to layer, which is not supported")
        return int(values[0])

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, f"is {_short(value)}, not a number above 0")
        return float(value)

    def refuse(self, key: str) -> None:
        """Fail if the file has the key with a value other than 0 or false."""
        if self.get(key):
            raise self.wrong(key, "is not supported for this architecture")

    def table(self, name: str, length: int) -> list[float] | None:
        """The numbers of a small tensor of float32, finite and above 0; None if it is not there."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32" or tensor.shape != (length,):
            raise ModelError(f"{tensor.file}: tensor {name} is {tensor.type} {list(tensor.shape)}, not F32 [{length}]")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            found = list(struct.unpack(f"<{length}f", stream.read(tensor.num_bytes)))
        for number in found:
            if not 0 < number < math.inf:
                raise ModelError(f"{tensor.file}: tensor {name} has {number}, not a number above 0")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that has to be there, outputs first."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.file.path}: the weights lack tensor {name}")
        return tensor.shape


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
