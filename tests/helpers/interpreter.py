"""Triton's interpreter, in half the time, as it asks itself the same things at each call of each function, and with
products that are the same on every CPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def hasten() -> None:
    """Spare the interpreter what it repeats, if a kernel has been imported; another Triton than ours stays as it is."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not {"_patch_lang", "_patch_builtin", "_get_np_dtype"} <= vars(interpreter).keys():
        return
    interpreter._get_np_dtype = numpy_types(interpreter._get_np_dtype)
    interpreter._patch_builtin = patching(interpreter)
    interpreter._patch_lang = patching_once(interpreter)
    builder = interpreter.interpreter_builder
    type(builder).create_dot = exact_dot(type(builder).create_dot, interpreter.tl.float64)
    if not builder.options.debug:  # without it the sums of 64 bits that look for overflows are made, and thrown away
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
