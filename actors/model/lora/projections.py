"""The products of a model that adapters may change: their modules in the model's files, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import Dense, Mla


@dataclass(frozen=True, slots=True)
class Projection:
    """One product x [T, inputs] -> [T, sum of widths]: ``modules`` by our names, and the outputs of each."""

    modules: tuple[str, ...]
    inputs: int
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        """It is known by its first module."""
        return self.modules[0]


def projections(config: ModelConfig) -> Iterator[Projection]:
    """All of a model, layer by layer. Latent attention and experts have none."""
    hidden, names = config.hidden_size, config.names
    for index, layer in enumerate(config.spec.layers):
        prefix, mixer, feed = f"model.layers.{index}", layer.mixer, layer.feed
        query, key = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        if not isinstance(mixer, Mla):
            parts = {"q_proj": query, "k_proj": key, "v_proj": key}
            if names.qkv is not None:
                parts = {names.qkv: query + 2 * key}
            yield _projection(f"{prefix}.self_attn", parts, hidden)
            yield _projection(f"{prefix}.self_attn", {"o_proj": hidden}, query)
        if isinstance(feed, Dense):
            parts = {"up_proj": feed.width}
            if feed.gated:
                both = {"gate_proj": feed.width, "up_proj": feed.width}
                parts = both if names.gate_up is None else {names.gate_up: 2 * feed.width}
            yield _projection(f"{prefix}.mlp", parts, hidden)
            yield _projection(f"{prefix}.mlp", {"down_proj": hidden}, feed.width)


def _projection(prefix: str, parts: dict[str, int], inputs: int) -> Projection:
    return Projection(tuple(f"{prefix}.{name}" for name in parts), inputs, tuple(parts.values()))
