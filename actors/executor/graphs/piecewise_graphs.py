"""Piecewise CUDA graphs: of the parts of a step between the attentions of two layers.

Attention over many tokens uses a library, or kernels whose launch shapes depend on the rows, so such a step has no
graph of its own. The rest depends only on the number of tokens. It is captured layer by layer, padded to a size, and
replayed between attentions that are launched as usual. A layer is then launched in four calls instead of ten, and
launches are what steps of small models wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.models import AttentionBatch, Tokens
from pagebus.actors.executor.models.decoder import Decoder


class Graph(Protocol):
    """What was captured, as far as it is used here: :class:`torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PiecewiseGraphs:
    """The graphs of P tokens, by layer, and what each leaves behind: ``residual`` [P, H], which is the same for all,
    and ``qkv`` [P, Hq + 2 Hkv, D]. They own none of this: the next capture gets the memory too."""

    graphs: Sequence[Graph]
    residual: torch.Tensor
    qkv: Sequence[torch.Tensor]

    def of(self, num_tokens: int) -> PiecewiseGraphs:
        """For a pass that begins with so many tokens and is padded to P."""
        return PiecewiseGraphs(self.graphs, self.residual[:num_tokens], [qkv[:num_tokens] for qkv in self.qkv])

    @torch.inference_mode()
    def forward(self, model: Decoder, tokens: Tokens, batch: AttentionBatch) -> torch.Tensor:
        """:meth:`Decoder.forward` of the padded ``tokens`` [P], from the graphs."""
        step = model.begin(tokens.ids, tokens.positions, tokens.kv_cache, batch)
        stream, last = ResidualStream(self.residual, model.ops), len(self.graphs) - 1
        for layer, graph, qkv in zip(model.layers[:last], self.graphs, self.qkv, strict=False):
            graph.replay()
            layer.attend(stream, qkv, tokens.kv_cache, step.attention)
            stream.settle()
        self.graphs[last].replay()
        return model.finish(stream, self.qkv[last], step)


@dataclass(frozen=True, slots=True)
class LaunchedPieces:
    """The same for a pass that begins with ``num_tokens``, kernel by kernel: what a rank launches that has no graphs of
    it yet, so that it exchanges what a rank does that has them."""

    num_tokens: int

    def of(self, num_tokens: int) -> LaunchedPieces:
        """As :meth:`PiecewiseGraphs.of`."""
        return LaunchedPieces(num_tokens)

    @torch.inference_mode()
    def forward(self, model: Decoder, tokens: Tokens, batch: AttentionBatch) -> torch.Tensor:
        """As :meth:`PiecewiseGraphs.forward`."""
        step = model.begin(tokens.ids, tokens.positions, tokens.kv_cache, batch)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(model.layers[:-1]):
            residual, qkv = run_piece(model, index, residual, tokens)
            stream = ResidualStream(residual[: self.num_tokens], model.ops)
            layer.attend(stream, qkv[: self.num_tokens], tokens.kv_cache, step.attention)
            stream.settle()
            del qkv  # the next piece may have its memory
        residual, qkv = run_piece(model, len(model.layers) - 1, residual, tokens)
        stream = ResidualStream(residual[: self.num_tokens], model.ops)
        return model.finish(stream, qkv[: self.num_tokens], step)


Pieces = PiecewiseGraphs | LaunchedPieces


Capturing = Callable[[], AbstractContextManager[Graph]]


def capture_pieces(
    model: Decoder, tokens: Tokens, capturing: Capturing, pause: Callable[[], object]
) -> PiecewiseGraphs:
    """Capture every piece of a pass of these tokens; ``pause`` is called before each."""
    graphs, qkv = [], []
    residual: torch.Tensor | None = None
    for index in range(len(model.layers)):
        pause()
        with capturing() as graph:
            residual, found = run_piece(model, index, residual, tokens)
        graphs.append(graph)
        qkv.append(borrow(found))
        del found  # the next piece may have its memory
    assert residual is not None
    return PiecewiseGraphs(graphs, borrow(residual), qkv)


def run_pieces(model: Decoder, tokens: Tokens) -> None:
    """Launch what would be captured."""
    residual: torch.Tensor | None = None
    for index in range(len(model.layers)):
        residual, _ = run_piece(model, index, residual, tokens)


def run_piece(
    model: Decoder, index: int, residual: torch.Tensor | None, tokens: Tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """From where the attention of the layer before ends to where that of layer ``index`` begins: ``residual`` [T, H],
    None before the first layer -> itself, and queries, keys and values [T, Hq + 2 Hkv, D]."""
    layer = model.layers[index]
    stream = ResidualStream(model.entering(tokens.ids) if residual is None else residual, model.ops)
    if index:
        model.layers[index - 1].feed_forward(stream, layer.attention_norm, tokens.padding)
    qkv = layer.project(stream, tokens)
    return stream.values, qkv


class _DeviceMemory:
    """Names a piece of device memory without owning it, in numba's array interface, as whole numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.itemsize
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "version": 3,
        }


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` that does not keep its memory: the graphs' pool gives it to the next capture too.

    If the graphs kept their outputs, these would take gigabytes. Between a replay and the next nothing else writes to
    the memory, and it is read only then.
    """
    return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype)
