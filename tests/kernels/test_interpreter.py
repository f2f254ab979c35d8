"""What tests spare Triton's interpreter changes none of its answers (tests/helpers/interpreter.py)."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers.interpreter import numpy_types, patching, patching_once

NUMPY_TYPES = {
    tl.int1: bool, tl.int8: np.int8, tl.uint8: np.uint8, tl.int32: np.int32, tl.uint32: np.uint32, tl.int64: np.int64,
    tl.float16: np.float16, tl.bfloat16: np.uint16, tl.float32: np.float32, tl.float8e4nv: np.uint8,
}  # fmt: skip


def builtin() -> None:
    """A builtin of the language of `Fake`."""


builtin.__dict__["__triton_builtin__"] = True


class Fake(ModuleType):
    """An interpreter with a language of its own, which notes what is patched."""

    def __init__(self) -> None:
        super().__init__("interpreter")
        self.tl: Any = ModuleType("language")
        self.tl.core, self.tl.tensor, self.tl.math = ModuleType("core"), ModuleType("tensor"), ModuleType("math")
        self.tl.core.is_builtin = tl.core.is_builtin
        self.tl.arange = self.tl.core.arange = self.tl.tensor.sum = builtin
        self.tl.other = 1
        self.patched: list[str] = []
        self._LangPatchScope = list

    def _patch_attr(self, package: ModuleType, name: str, member: object, builder: None, scope: None) -> None:
        assert member is builtin
        setattr(package, name, "patched")
        self.patched.append(f"{package.__name__}.{name}")

    def _patch_lang(self, fn: FunctionType) -> str:
        return f"the language of {fn.__name__}"


def test_numpy_types_of_scalars_and_blocks_and_pointers() -> None:
    """The first time and from then on."""
    get_np_dtype = numpy_types(interpreter._get_np_dtype)
    for dtype, expected in [*NUMPY_TYPES.items()] * 2:
        pointer = tl.pointer_type(dtype)
        assert get_np_dtype(dtype) == get_np_dtype(tl.block_type(dtype, [4, 8])) == expected
        assert get_np_dtype(pointer) == get_np_dtype(tl.block_type(pointer, [4])) == np.uint64


def test_builtins_are_patched_unless_they_are() -> None:
    """All of them, again when they have been restored, and nothing else."""
    fake = Fake()
    patch_builtin = patching(fake)
    for _ in range(2):
        for _ in range(2):
            patch_builtin(fake.tl, None, None)
            patch_builtin(fake.tl.tensor, None, None)
        assert fake.patched == ["language.arange", "tensor.sum"]
        fake.tl.arange = fake.tl.tensor.sum = builtin
        fake.patched.clear()


def test_a_patched_language_is_left_alone() -> None:
    """It is where a kernel calls a function: with all that this function sees of the language."""
    fake = Fake()
    patch_lang = patching_once(fake)
    kernel, function = [FunctionType(builtin.__code__, {"tl": fake.tl}, name) for name in ("kernel", "function")]
    library = FunctionType(builtin.__code__, {"core": fake.tl.core}, "library")
    assert patch_lang(kernel) == "the language of kernel"
    fake.tl.arange = None
    assert patch_lang(function) == []
    assert patch_lang(library) == "the language of library"
    fake.tl.core.arange = None
    assert patch_lang(library) == []
    fake.tl.arange = builtin
    assert patch_lang(kernel) == "the language of kernel"
