"""Triton's interpreter, in half the time, as it asks itself the same things at each call of each function, and with
products that are the same on every CPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

PATCHED = {"_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "_convert_float", "TensorHandle"}


def hasten() -> None:
    """Spare the interpreter what it repeats, if a kernel has been imported; another Triton than ours stays as it is."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or PATCHED - vars(interpreter).keys():
        return
    interpreter._get_np_dtype = numpy_types(interpreter._get_np_dtype)
    interpreter._patch_attr = bound_once(interpreter)
    interpreter._patch_builtin = patching(interpreter)
    interpreter._patch_lang = patching_once(interpreter)
    interpreter._convert_float = looked_up(interpreter._convert_float)
    if os.environ.get("TRITON_INTERPRET") == "1":  # what is compiled is left alone
        shapes_once(interpreter.tl.core)
        semantic = type(interpreter.interpreter_semantic)
        semantic.binary_op_type_checking_impl = alike_at_once(interpreter, semantic.binary_op_type_checking_impl)
    builder = interpreter.interpreter_builder
    type(builder).create_dot = exact_dot(type(builder).create_dot, interpreter.tl.float64)
    if not builder.options.debug:  # without it the sums of 64 bits that detect overflows are made, and thrown away
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def exact_dot(original: Callable[..., Any], float64: Any) -> Callable[..., Any]:
    """``create_dot``, whose float32 sums are made in float64 and rounded once. A row of OpenBLAS's float32 products has
    other last bits beside other rows, with its kernels for some CPUs; tests compare bits of rows in other company."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return original(self, a, b, d, *options)
        product = original(self, a, b, type(d)(d.data.astype(np.float64), float64), *options)
        return type(d)(product.data.astype(np.float32), d.dtype.scalar)

    return create_dot


def numpy_types(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_get_np_dtype``, which builds a table each time, with a table of what it has said. It has no pointers."""
    known: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return original(dtype)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = original(dtype)
        return found

    return get_np_dtype


def looked_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_convert_float``, which computes bit by bit, with tables of what it says of numbers of one or two bytes."""
    tables: dict[tuple[Any, ...], Any] = {}

    def convert_float(numbers: Any, before: Any, after: Any, rounding: Any) -> Any:
        bits = before.primitive_bitwidth
        if bits > 16:
            return original(numbers, before, after, rounding)
        key, unsigned = (before.name, after.name, rounding), np.dtype(f"uint{bits}")
        table = tables.get(key)
        if table is None:
            table = tables[key] = original(np.arange(2**bits, dtype=unsigned), before, after, rounding)
        return table[np.ascontiguousarray(numbers).view(unsigned)]

    return convert_float


def bound_once(interpreter: ModuleType) -> Callable[..., None]:
    """``_patch_attr``, which gives a builtin its semantics, without a look at every argument of every call."""
    semantic = interpreter.interpreter_semantic

    @functools.cache
    def bound(member: Any) -> Callable[..., Any]:
        checks = member.__code__.co_qualname == "builtin.<locals>.wrapper"  # whether there are semantics: there are
        function = member.__wrapped__ if checks else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(package, name, bound(member))

    return patch_attr


def shapes_once(core: ModuleType) -> None:
    """Types of blocks and what tensors know of their shapes, looked up: a kernel has a few, and makes them anew for
    each operation. Nobody changes them."""
    constexpr, tuples = core.constexpr, (list, tuple, core.tuple)
    block_type, tensor, same_tuple = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}

    def plain(values: Any) -> list[Any]:
        return [value.value if type(value) is constexpr else value for value in values]

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *plain(shape)) if isinstance(shape, tuples) else ()
        found = blocks.get(key)
        if found is None:
            block_type(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.element_ty = element_ty
            vars(self).update(found)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if isinstance(type, core.block_type) else ()
        found = shapes.get(key)
        if found is None:
            tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(found)

    def is_same_tuple(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if not isinstance(values, (list, tuple)) or any(isinstance(value, tuples) for value in values):
            return same_tuple(self, other)
        return constexpr(self.values == plain(values))

    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = make_block_type, make_tensor, is_same_tuple


def alike_at_once(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """``binary_op_type_checking_impl``, which has nothing to do for two tensors of one type, and little for a block and
    a number that its type holds."""
    tensor, handle, halves = interpreter.tl.core.tensor, interpreter.TensorHandle, ("fp16", "bf16")

    def number(value: Any, name: str) -> Any:
        if name == "int32":
            return np.int32 if type(value) is int and -(2**31) <= value < 2**31 else None
        return np.float32 if name == "fp32" and type(value) in (int, float) and abs(value) < 2**127 else None

    def operands(
        self: Any, lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False, arithmetic: bool = True,
        division: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        if type(lhs) is tensor and not (division and lhs.dtype.name in halves):
            if type(rhs) is tensor:
                if lhs.shape is rhs.shape and lhs.dtype.name == rhs.dtype.name and not lhs.dtype.is_ptr():
                    return lhs, rhs
            elif arithmetic and len(lhs.shape):
                dtype = number(rhs, lhs.dtype.name)
                if dtype is not None:
                    data = np.full(lhs.type.shape.values, rhs, dtype=dtype)
                    return lhs, tensor(handle(data, lhs.dtype), lhs.type)
        return original(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)

    return operands


def patching(interpreter: ModuleType) -> Callable[..., None]:
    """``_patch_builtin``, which knows from the first time which members of a package are builtins."""
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    for package in (interpreter.tl, interpreter.tl.core, interpreter.tl.tensor, interpreter.tl.math):
        names(package)  # while none is patched
    return patch_builtin


def patching_once(interpreter: ModuleType) -> Callable[[Any], Any]:
    """``_patch_lang``, which does nothing for a function that a kernel calls: the language is patched already."""
    original, language, core = interpreter._patch_lang, interpreter.tl, interpreter.tl.core

    @functools.cache
    def seen_by(fn: Any) -> list[Any]:
        return [package for package in (language, core) if any(each is package for each in fn.__globals__.values())]

    def patch_lang(fn: Any) -> Any:
        packages = seen_by(fn)
        if packages and not any(core.is_builtin(package.arange) for package in packages):
            return interpreter._LangPatchScope()
        return original(fn)

    return patch_lang
