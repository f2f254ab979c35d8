"""One layer of BERT's kind: attention among all tokens and two products, each added to its input and normed then."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.pooling.full_attention import full_attention
from pagebus.actors.model.spec import Dense, LayerSpec, ModelSpec

APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


class BiasedNorm:
    """Norm of the last dimension with its mean taken off, a weight and a bias, in float32 inside."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self._weight = parameters.bias({f"{name}.weight": size})
        self._bias = parameters.bias({f"{name}.bias": size})
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H], a new tensor."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class EncoderLayer:
    """x [T, H] -> [T, H]."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, parameters: Parameters, prefix: str, ops: Ops) -> None:
        mixer, feed, hidden, eps = layer.mixer, layer.feed, spec.hidden, spec.norm.eps
        assert isinstance(feed, Dense)
        self.spec = layer
        width = mixer.heads * mixer.head_dim
        self._shape = 3, mixer.heads, mixer.head_dim
        self._scale = mixer.scale
        self._approximate = APPROXIMATIONS[feed.act]
        sizes = dict.fromkeys(("query", "key", "value"), width)
        self._qkv = Linear(parameters, f"{prefix}.attention.self", sizes, hidden, ops, bias=True)
        self._out = Linear(parameters, f"{prefix}.attention.output", {"dense": hidden}, width, ops, bias=True)
        self._norm = BiasedNorm(parameters, f"{prefix}.attention.output.LayerNorm", hidden, eps)
        self._up = Linear(parameters, f"{prefix}.intermediate", {"dense": feed.width}, hidden, ops, bias=True)
        self._down = Linear(parameters, f"{prefix}.output", {"dense": hidden}, feed.width, ops, bias=True)
        self._last_norm = BiasedNorm(parameters, f"{prefix}.output.LayerNorm", hidden, eps)

    def __call__(self, x: torch.Tensor, query_start: torch.Tensor, longest: int) -> torch.Tensor:
        """``query_start`` [R + 1] and ``longest``: as in :func:`full_attention`."""
        q, k, v = self._qkv(x).view(-1, *self._shape).unbind(1)
        seen = full_attention(q, k, v, query_start, longest, self._scale)
        x = self._norm(self._out(seen.reshape(len(x), -1)) + x)
        wide = F.gelu(self._up(x), approximate=self._approximate)
        return self._last_norm(self._down(wide) + x)
