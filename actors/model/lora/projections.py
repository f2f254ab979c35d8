"""The products of a model that adapters may change: their modules in the model's files, inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import Dense, Mla, Moe

EXPERTS = "experts"
"""What products of experts are called where targets are named."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What targets may call modules that are one product."""
BIAS = "bias"
"""The target that leaves room for a bias beside each pair of matrices."""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
LARGE = {EXPERTS, EMBEDDING.rpartition(".")[2], HEAD}
"""Targets that have to be named."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One product x [T, inputs] -> [T, sum of widths]: ``modules`` by our names, and the outputs of each. Of a layer's
    ``experts`` (0: it has none) each has such a product, and the modules are named without their numbers."""

    modules: tuple[str, ...]
    inputs: int
    widths: tuple[int, ...]
    experts: int = 0

    @property
    def name(self) -> str:
        """It is known by its first module."""
        return self.modules[0]

    @property
    def fused(self) -> str:
        """The name of gate and up as one tensor, as files have all experts' in one."""
        return f"{self.name.rpartition('.')[0]}.{'gate_up_proj' if len(self.modules) > 1 else 'down_proj'}"

    @property
    def copies(self) -> int:
        """How many products there are."""
        return max(1, self.experts)


def projections(config: ModelConfig, targets: Collection[str] = ()) -> Iterator[Projection]:
    """Those of a model of which a module is among the ``targets``, layer by layer; without targets all in layers but
    experts'. An embedding is the product with its tokens, one of ``inputs``."""
    return (each for each in all_projections(config) if _is_among(each, targets))


def all_projections(config: ModelConfig) -> Iterator[Projection]:
    """All of a model, layer by layer."""
    hidden, names, vocab = config.hidden_size, config.names, config.spec.vocab
    yield Projection((EMBEDDING,), vocab, (hidden,))
    for index, layer in enumerate(config.spec.layers):
        prefix, mixer, feed = f"model.layers.{index}", layer.mixer, layer.feed
        if isinstance(mixer, Mla):
            yield from _of_latents(f"{prefix}.self_attn", mixer, hidden)
        else:
            query, key = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            parts = {"q_proj": query, "k_proj": key, "v_proj": key}
            if names.qkv is not None:
                parts = {names.qkv: query + 2 * key}
            yield _projection(f"{prefix}.self_attn", parts, hidden)
            yield _projection(f"{prefix}.self_attn", {"o_proj": hidden}, query)
        if isinstance(feed, Moe):
            yield from _of_experts(f"{prefix}.mlp.{EXPERTS}", feed, hidden)
            if feed.shared is not None:
                yield from _of_dense(f"{prefix}.mlp.shared_expert", feed.shared, hidden, names.gate_up)
        else:
            yield from _of_dense(f"{prefix}.mlp", feed, hidden, names.gate_up)
    yield Projection((HEAD,), hidden, (vocab if config.shard is None else len(config.shard.of(vocab)),))


def _of_latents(prefix: str, mixer: Mla, hidden: int) -> Iterator[Projection]:
    """All products but the one that makes keys and values of latents: that is no product of tokens."""
    queries = mixer.heads * mixer.query_dim
    first = {"q_a_proj": mixer.q_rank} if mixer.q_rank else {"q_proj": queries}
    yield _projection(prefix, first | {"kv_a_proj_with_mqa": mixer.head_dim}, hidden)
    if mixer.q_rank:
        yield _projection(prefix, {"q_b_proj": queries}, mixer.q_rank)
    yield _projection(prefix, {"o_proj": hidden}, mixer.attended)


def _of_dense(prefix: str, feed: Dense, hidden: int, fused: str | None) -> Iterator[Projection]:
    parts = {"up_proj": feed.width}
    if feed.gated:
        both = {"gate_proj": feed.width, "up_proj": feed.width}
        parts = both if fused is None else {fused: 2 * feed.width}
    yield _projection(prefix, parts, hidden)
    yield _projection(prefix, {"down_proj": hidden}, feed.width)


def _of_experts(prefix: str, feed: Moe, hidden: int) -> Iterator[Projection]:
    count = len(feed.here)
    yield _projection(prefix, {"gate_proj": feed.width, "up_proj": feed.width}, hidden, count)
    yield _projection(prefix, {"down_proj": hidden}, feed.width, count)


def _projection(prefix: str, parts: dict[str, int], inputs: int, experts: int = 0) -> Projection:
    return Projection(tuple(f"{prefix}.{name}" for name in parts), inputs, tuple(parts.values()), experts)


def _is_among(projection: Projection, targets: Collection[str]) -> bool:
    if projection.experts:
        return EXPERTS in targets
    wanted = {part for target in targets for part in (target, *FUSED.get(target, ()))}
    named = {module.rpartition(".")[2] for module in projection.modules}
    return bool(named & wanted) or not (targets or named & LARGE)
