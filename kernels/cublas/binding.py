"""The functions of cuBLASLt by which a product's algorithm is chosen. torch takes the one that is proposed first.

Names and numbers are those of NVIDIA's ``cublasLt.h``. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

TYPES = {torch.float16: 2, torch.bfloat16: 14}
"""The numbers of cudaDataType_t."""
FLOAT32, COMPUTE_FLOAT32 = 0, 68
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8
"""Attributes of a product (``MatmulDesc``)."""
TRANSPOSED, ADD_BIAS = 1, 4
BATCH_COUNT, BATCH_STRIDE = 5, 6
"""Attributes of a matrix (``MatrixLayout``) of which there are several."""
WORKSPACE_BYTES, ALIGNMENTS = 1, (5, 6, 7, 8)
"""Attributes of a preference (``MatmulPreference``): the most scratch memory, and how all matrices are aligned."""
TILE, OPTION, CLUSTER = 1, 5, 8
"""Attributes of an algorithm (``MatmulAlgoConfig``)."""
USUAL, ALONE = 0, 2
"""The option that every tile has, and a cluster of one program."""
MOST_PROPOSED = 16


class LtError(Exception):
    """A call that failed, with its status."""


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, which is opaque."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "Create": (POINTER(c_void_p),),
    "MatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "MatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulDescDestroy": (c_void_p,),
    "MatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, ctypes.c_int64),
    "MatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulPreferenceCreate": (POINTER(c_void_p),),
    "MatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulPreferenceDestroy": (c_void_p,),
    "MatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, POINTER(Proposal), POINTER(c_int)),
    "MatmulAlgoConfigGetAttribute": (c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "MatmulAlgoConfigSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulAlgoCheck": (*(c_void_p,) * 7, POINTER(Proposal)),
    "Matmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


@cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as torch has loaded it; None if there is none, as on a CPU."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{major}")
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError):
        return None
    return found


def call(name: str, *arguments: object) -> None:
    """Call a function of the library.

    Raises:
        LtError: it failed.
    """
    status = getattr(library(), f"cublasLt{name}")(*arguments)
    if status:
        raise LtError(f"cublasLt{name}: {status}")


def created_by(name: str, *arguments: object) -> c_void_p:
    """What a function of the library creates."""
    created = c_void_p()
    call(name, byref(created), *arguments)
    return created


@cache
def handle(device: int) -> c_void_p:
    """The library's handle for a GPU."""
    with torch.cuda.device(device):
        return created_by("Create")


def set_attribute(kind: str, owner: object, attribute: int, value: Any) -> None:
    """Of an owner of this kind; ``value`` is a number or a pointer of ctypes."""
    call(f"{kind}SetAttribute", owner, attribute, byref(value), ctypes.sizeof(value))


def tile_of(proposal: Proposal) -> int:
    """The number of an algorithm's tile (cublasLtMatmulTile_t)."""
    value, written = c_uint32(), c_size_t()
    size = ctypes.sizeof(value)
    call("MatmulAlgoConfigGetAttribute", byref(proposal), TILE, byref(value), size, byref(written))
    return value.value
