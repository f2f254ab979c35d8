"""What the library has to be told of a product, and the algorithms that it proposes for it.

They are those that it proposes if it gets no scratch memory: they deal their tiles out in a fixed order. With scratch
memory a counter there deals them out, which has to be cleared by a launch of its own before each product.
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

from pagebus.kernels.cublas import binding
from pagebus.kernels.cublas.binding import LtError, Proposal, call, created_by, handle, set_attribute
from pagebus.kernels.cublas.tiles import MADE

ALIGNMENT = 16
"""Of matrices and of their rows, in bytes."""
ZERO, ONE = c_float(0.0), c_float(1.0)


class Shape(NamedTuple):
    """Of x [T, K], whose rows begin every ``x_stride`` numbers, times weight [N, K]. With several ``parts`` of K their
    sums are float32 and lie one behind the other."""

    num_tokens: int
    num_rows: int
    num_inputs: int
    x_stride: int
    dtype: torch.dtype
    device: int
    biased: bool = False
    parts: int = 1


class Plan:
    """A product's descriptors, which are the library's, and its ``proposals``, the preferred one first."""

    def __init__(self, shape: Shape) -> None:
        """Raises LtError: the library proposes nothing."""
        self._created: list[tuple[str, c_void_p]] = []
        weakref.finalize(self, _destroy, self._created).atexit = False
        self._handle = handle(shape.device)
        self._product = self._create("MatmulDesc", binding.COMPUTE_FLOAT32, binding.FLOAT32)
        set_attribute("MatmulDesc", self._product, binding.TRANSPOSE_A, c_int32(binding.TRANSPOSED))
        if shape.biased:
            set_attribute("MatmulDesc", self._product, binding.EPILOGUE, c_uint32(binding.ADD_BIAS))
        # The library counts by columns: to it these are [K, N], [K, T] and [N, T].
        number, parts, part = binding.TYPES[shape.dtype], shape.parts, shape.num_inputs // shape.parts
        sums = number if parts == 1 else binding.FLOAT32
        tokens, rows = shape.num_tokens, shape.num_rows
        self._weight = self._matrix(number, (part, rows, shape.num_inputs), parts, part)
        self._x = self._matrix(number, (part, tokens, shape.x_stride), parts, part)
        self._out = self._matrix(sums, (rows, tokens, rows), parts, rows * tokens)
        self.proposals = self._proposals()
        if parts > 1:
            self.proposals += self._made(MADE)

    def set_bias(self, bias: torch.Tensor) -> None:
        """Of the next product."""
        set_attribute("MatmulDesc", self._product, binding.BIAS_POINTER, c_void_p(bias.data_ptr()))

    def launch(self, proposal: Proposal, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by this algorithm, on the current stream."""
        call(
            "Matmul", self._handle, self._product, byref(ONE), weight.data_ptr(), self._weight, x.data_ptr(), self._x,
            byref(ZERO), out.data_ptr(), self._out, out.data_ptr(), self._out, byref(proposal), None, 0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip

    def _proposals(self) -> list[Proposal]:
        preference = self._create("MatmulPreference")
        set_attribute("MatmulPreference", preference, binding.WORKSPACE_BYTES, c_uint64(0))
        for attribute in binding.ALIGNMENTS:
            set_attribute("MatmulPreference", preference, attribute, c_uint32(ALIGNMENT))
        found, count = (Proposal * binding.MOST_PROPOSED)(), c_int()
        call("MatmulAlgoGetHeuristic", *self._described(), preference, len(found), found, byref(count))
        proposals = [proposal for proposal in found[: count.value] if not proposal.state]
        if not proposals:
            raise LtError("nothing is proposed")
        return proposals

    def _made(self, tile: int) -> list[Proposal]:
        """The first proposal with another tile, if the library has it and needs no scratch memory for it."""
        made, checked = Proposal.from_buffer_copy(self.proposals[0]), Proposal()
        attributes: dict[int, Any] = {
            binding.TILE: c_uint32(tile), binding.CLUSTER: c_uint16(binding.ALONE),
            binding.OPTION: c_uint32(binding.USUAL),
        }  # fmt: skip
        try:
            for attribute, value in attributes.items():
                set_attribute("MatmulAlgoConfig", byref(made), attribute, value)
            call("MatmulAlgoCheck", *self._described(), byref(made), byref(checked))
        except LtError:
            return []
        return [] if checked.state or checked.workspace_bytes else [made]

    def _described(self) -> tuple[c_void_p, ...]:
        return self._handle, self._product, self._weight, self._x, self._out, self._out

    def _matrix(self, number: int, sizes: tuple[int, int, int], count: int, distance: int) -> c_void_p:
        created = self._create("MatrixLayout", number, *sizes)
        set_attribute("MatrixLayout", created, binding.BATCH_COUNT, c_int32(count))
        set_attribute("MatrixLayout", created, binding.BATCH_STRIDE, c_int64(distance))
        return created

    def _create(self, kind: str, *arguments: int) -> c_void_p:
        created = created_by(f"{kind}Create", *arguments)
        self._created.append((f"{kind}Destroy", created))
        return created


def _destroy(created: list[tuple[str, c_void_p]]) -> None:
    for destroy, each in created:
        call(destroy, each)
