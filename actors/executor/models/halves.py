"""Passes of many tokens whose ranks compute them in two halves.

Attention needs all tokens of a pass; what lies between two attentions computes each token by itself. So it is done for
the first half of the tokens and for the second one by turns. The sum over ranks of what one half adds to its residual
stream, and the norm behind that sum, then run beside products of the other half:

    products   out 1 | out 2 |  MLP 1  |  MLP 2  | qkv 1 | qkv 2 | attention
    sums             | sum 1 | sum 2   | sum 1   | sum 2 |

Which passes are cut, and where, follows from their shape alone: all ranks cut alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import Attention
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.layers.decoder_layer import DecoderLayer
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.model.spec import Dense, LayerSpec, Mla
from pagebus.kernels.layers.norm import HalfNorm
from pagebus.kernels.quantized.products import Inputs

if TYPE_CHECKING:
    from pagebus.actors.executor.models.decoder import ForwardPass

LEAST_BYTES = 32 * 1024 * 1024
"""Of the residual stream of a pass: smaller sums are done before products of half the tokens would hide them."""
ROWS = 128
"""The first half is a multiple of so many tokens, which kernels of products take at a time."""


def may_be_halved(layers: Sequence[LayerSpec], comm: Comm) -> bool:
    """Whether passes through such layers may be cut: nothing is exchanged between attentions but sums into the residual
    stream, and tokens are computed in half the time that twice as many take. Of experts they are not, since each half
    may read the weights of all."""
    return comm.hides and all(
        isinstance(layer.feed, Dense)
        and not isinstance(layer.mixer, Mla)
        and layer.mixer.qk_norm != "width"
        and layer.norms != "shared"
        for layer in layers
    )


def is_halved(batch: AttentionBatch, num_tokens: int, row_bytes: int) -> bool:
    """Whether a pass of so many tokens is cut, whose residual stream has so many bytes a token. Those of fixed shape,
    which CUDA graphs are made of, are not."""
    fixed = batch.decode_lens is not None or batch.num_decodes == num_tokens
    return not fixed and num_tokens >= 2 * ROWS and num_tokens * row_bytes >= LEAST_BYTES


class _Begun(NamedTuple):
    """A norm behind a sum that is under way; ``added`` is what it reads, which lives until then."""

    wait: Callable[[], Inputs]
    added: torch.Tensor | HalfNorm | None


class _Half(NamedTuple):
    """Some tokens of a pass, in its ``places``."""

    places: slice
    stream: ResidualStream
    tokens: Tokens
    comm: Comm

    def begin(self, normed: Callable[[ResidualStream], Inputs]) -> _Begun:
        """What ``normed`` reads of the stream, beside what is launched next."""
        added = self.stream.added
        return _Begun(self.comm.beside(lambda: normed(self.stream)), added)


def _halves(values: torch.Tensor, tokens: Tokens, ops: Ops) -> list[_Half]:
    middle = len(values) // 2 // ROWS * ROWS
    places = slice(0, middle), slice(middle, len(values))
    return [_Half(each, ResidualStream(values[each], ops), tokens.part(each), ops.comm) for each in places]


def until_last(
    layers: Sequence[DecoderLayer], values: torch.Tensor, step: ForwardPass, ops: Ops, pause: Callable[[], object]
) -> torch.Tensor:
    """From the residual stream ``values`` [T, H] before the ``layers``, which becomes that before the attention of the
    last one, to queries, keys and values [T, Hq + 2 Hkv, D] of that."""
    qkv = layers[0].project(ResidualStream(values, ops), step.tokens)
    halves = _halves(values, step.tokens, ops)
    for layer, following in itertools.pairwise(layers):
        pause()
        attended = layer.attention.attend(qkv, step.tokens.kv_cache, step.attention)
        del qkv  # the MLP may have its memory
        begun = []
        for half in halves:
            layer.add_attended(half.stream, attended[half.places])
            begun.append(half.begin(layer.normed_for_feed))
        del attended
        fed = []
        for half, sums in zip(halves, begun, strict=True):
            layer.feed(half.stream, sums.wait(), following.attention_norm, half.tokens.padding)
            fed.append(half.begin(following.normed))
        attention = following.attention
        assert isinstance(attention, Attention)
        qkv = values.new_empty(len(values), sum(attention.sizes), attention.heads.head_dim)
        for half, sums in zip(halves, fed, strict=True):
            attention.project(sums.wait(), half.tokens, qkv[half.places])
    pause()
    return qkv
