"""One layer of a decoder: attention, a feed-forward part, and the norms around them, as its spec says."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import Attention
from pagebus.actors.executor.layers.attention_batch import Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass
from pagebus.actors.executor.layers.latent.attention import LatentAttention
from pagebus.actors.executor.layers.linear import Linear
from pagebus.actors.executor.layers.mlp import GatedMLP, PlainMLP
from pagebus.actors.executor.layers.moe import MixtureOfExperts
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.spec import Feed, Mla, Moe, NormPlaces
from pagebus.kernels.quantized.coding import Kind, experts_kind_of, kind_of

NORMS: dict[NormPlaces, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "shared": ("input_layernorm", None, None, None),
}
"""Names of the norms before attention, behind it, before the feed-forward part, and behind it."""


class DecoderLayer:
    """Attention and feed-forward of one layer; ``attention_norm`` is what reads the residual stream first, if any."""

    def __init__(
        self, config: ModelConfig, index: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        self.spec = spec = config.spec.layers[index]

        def norm(name: str | None) -> Norm | None:
            size = config.hidden_size
            return None if name is None else Norm(parameters, f"{prefix}.{name}", size, config.spec.norm, ops)

        before, behind, before_feed, behind_feed = NORMS[spec.norms]
        self.attention_norm, self._attention_after = norm(before), norm(behind)
        made = LatentAttention if isinstance(spec.mixer, Mla) else Attention
        self.attention = made(config, index, parameters, f"{prefix}.self_attn", ops, rotary)
        self.mlp_norm, self._mlp_after = norm(before_feed), norm(behind_feed)
        self.mlp = _feed_forward(spec.feed, config, parameters, f"{prefix}.mlp", ops)
        self.taps: list[torch.Tensor] = []
        """Where the residual stream of each pass is copied to, as it is before the layer: [>= T, H] each."""

    @property
    def kinds(self) -> dict[str, Kind | None]:
        """How its quantized weights are, by the names of products; None: no kernel reads such a layout. Dense ones are
        left out."""
        attention = self.attention
        weights = {"qkv": attention.qkv.weight, "o": attention.out.weight, **self.mlp.weights}
        kinds = {name: kind_of(each) for name, each in weights.items() if not isinstance(each, torch.Tensor)}
        experts = self.mlp.expert_weights if isinstance(self.mlp, MixtureOfExperts) else {}
        return kinds | {name: experts_kind_of(e) for name, e in experts.items() if not isinstance(e, torch.Tensor)}

    @property
    def products(self) -> list[Linear]:
        """Those that adapters may change."""
        return [*self.attention.products, *self.mlp.products]

    @property
    def experts(self) -> MixtureOfExperts | None:
        """Its feed-forward part, if that is a mixture."""
        return self.mlp if isinstance(self.mlp, MixtureOfExperts) else None

    def project(self, stream: ResidualStream, tokens: Tokens) -> torch.Tensor:
        """The normed stream -> queries, keys and values [T, Hq + 2 Hkv, D]; see :meth:`Attention.project`. Where both
        parts read one norm, the feed-forward part is added here: what attention adds does not reach it."""
        alone = isinstance(self.attention, Attention) and self.spec.norms != "shared"
        x = stream.normed(self.attention_norm, self.attention.qkv if alone else None)
        for tap in self.taps:
            tap[: len(stream.values)].copy_(stream.values)
        qkv = self.attention.project(x, tokens)
        if self.spec.norms == "shared":
            self.mlp.into(stream, x, None, None, self.spec.residual_scale, tokens.padding)
            stream.settle()
        return qkv

    def attend(
        self, stream: ResidualStream, qkv: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass
    ) -> None:
        """Add what the tokens find in the cache to the stream."""
        before = self.mlp_norm if self.mlp.reads_halves else None
        attended = self.attention.attend(qkv, kv_cache, attention)
        stream.add(attended, self.attention.out, before, self._attention_after, self.spec.residual_scale)

    def feed_forward(self, stream: ResidualStream, following: Norm | None, padding: torch.Tensor | None) -> None:
        """Add the MLP of the normed stream to it; None is no norm that may be half done by then. ``padding`` [T]: as of
        :class:`Tokens`."""
        if self.spec.norms != "shared":
            x = stream.normed(self.mlp_norm, None if isinstance(self.mlp, MixtureOfExperts) else self.mlp.reader)
            self.mlp.into(stream, x, following, self._mlp_after, self.spec.residual_scale, padding)


def _feed_forward(
    spec: Feed, config: ModelConfig, parameters: Parameters, prefix: str, ops: Ops
) -> GatedMLP | PlainMLP | MixtureOfExperts:
    if isinstance(spec, Moe):
        return MixtureOfExperts(spec, config.hidden_size, parameters, prefix, ops, config.names)
    if not spec.gated:
        if not spec.act.startswith("gelu"):
            raise ModelError(f"a feed-forward part without a gate and with {spec.act} is not served")
        return PlainMLP(spec, config.hidden_size, parameters, prefix, ops)
    return GatedMLP(spec, config.hidden_size, parameters, prefix, ops, config.names.gate_up)
