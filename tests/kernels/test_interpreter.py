"""What tests spare Triton's interpreter changes none of its answers (tests/helpers/interpreter.py)."""

from __future__ import annotations

import inspect
import os
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.helpers.interpreter import alike_at_once, bound_once, looked_up, numpy_types, patching, patching_once

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled")

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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_numbers_of_one_and_two_bytes_are_looked_up(name: str, dtype: torch.dtype) -> None:
    """Each becomes the float32 that torch makes of it, and is asked for once. Infinite ones, and those below the normal
    ones of float32, the interpreter does not know."""
    asked: list[int] = []

    def convert(numbers: Any, *types: Any) -> Any:
        asked.append(numbers.size)
        return interpreter._convert_float(numbers, *types)

    before = tl.dtype(name)
    unsigned = np.dtype(f"uint{before.primitive_bitwidth}")
    numbers = np.arange(2**before.primitive_bitwidth, dtype=unsigned).reshape(-1, 8)
    expected = torch.from_numpy(numbers).view(dtype).float()
    convert_float = looked_up(convert)
    for part in (slice(None), slice(3, 5)):
        found = torch.from_numpy(convert_float(numbers[part, ::-1], before, tl.float32, None).view(np.float32))
        wanted = expected[part].flip(1)
        known = wanted.isfinite() & ((wanted == 0) | (wanted.abs() >= 2**-126))
        assert torch.equal(found[known], wanted[known])
    assert asked == [numbers.size]


def test_numbers_of_four_bytes_are_converted() -> None:
    """There are too many for a table."""
    convert_float = looked_up(lambda numbers, *types: (len(numbers), *types))
    assert convert_float(np.zeros(3, np.float32), tl.float32, tl.bfloat16, None) == (3, tl.float32, tl.bfloat16, None)


def test_a_builtin_gets_the_interpreters_semantics() -> None:
    """Whatever semantics it was called with."""
    scope = SimpleNamespace(set_attr=setattr)
    fake: Any = SimpleNamespace(interpreter_semantic="ours")
    package: Any = ModuleType("language")
    told = tl.core.builtin(lambda a, b=2, _semantic=None: (a, b, _semantic))
    bound_once(fake)(package, "told", told, None, scope)
    bound_once(fake)(package, "other", lambda a, _semantic: (a, _semantic), None, scope)
    assert package.told(1) == (1, 2, "ours")
    assert package.told(1, b=3, _semantic="another's") == (1, 3, "ours")
    assert package.other(4) == (4, "ours")


@interpreted
def test_types_of_blocks_made_twice() -> None:
    """They say the same the second time, and refuse the same."""
    for element, name in ((tl.float32, "fp32"), (tl.pointer_type(tl.float32), "pointer<fp32>")) * 2:
        block = tl.block_type(element, [4, tl.constexpr(8)])
        assert (block.name, block.numel, block.shape.values) == (f"<['4', '8'], {name}>", 32, [4, 8])
        assert block.scalar is element
        tensor = tl.tensor("handle", block)
        assert (tensor.handle, tensor.type, tensor.dtype, tensor.numel.value) == ("handle", block, element, 32)
        assert [size.value for size in tensor.shape] == [4, 8]
        assert block.shape == [4, 8]
        assert block.shape != [4, tl.constexpr(16)]
        assert block.shape != [4]
        scalar = tl.tensor("handle", element)
        assert (scalar.shape.values, scalar.numel.value, scalar.dtype) == ([], 1, element)
        with pytest.raises(ValueError, match="must be a power of 2"):
            tl.block_type(element, [4, 3])
        with pytest.raises(TypeError, match="0d"):
            tl.block_type(element, [])


FLOATS, INTS, HALVES = (tl.block_type(each, [4]) for each in (tl.float32, tl.int32, tl.float16))


@interpreted
@pytest.mark.parametrize("division", [False, True])
@pytest.mark.parametrize("other", [FLOATS, INTS, HALVES, tl.float32, 2, 0.5, -3, 2**40, True, 1e300])
@pytest.mark.parametrize("block", [FLOATS, INTS, HALVES])
def test_operands_are_what_the_interpreter_makes_of_them(block: Any, other: Any, division: bool) -> None:
    """Types and bits, or the error."""
    semantic = interpreter.interpreter_semantic
    whole = next(value for value in _cells(type(semantic).binary_op_type_checking_impl) if inspect.isfunction(value)
                 and value.__name__ == "binary_op_type_checking_impl")  # fmt: skip

    def operands(check: Any) -> Any:
        made = [_tensor(each) if isinstance(each, tl.dtype) else each for each in (block, other)]
        try:
            with np.errstate(over="ignore"):
                found = check(semantic, *made, False, False, True, division)
        except (TypeError, ValueError) as error:
            return repr(error)
        return [(str(each.type), each.handle.data.dtype, each.handle.data.tolist()) for each in found]

    assert operands(alike_at_once(interpreter, whole)) == operands(whole)


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__]


def _tensor(dtype: Any) -> Any:
    """One to four, or one."""
    data = np.arange(1, 5 if dtype.is_block() else 2, dtype=interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype.scalar), dtype)
