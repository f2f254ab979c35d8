"""The part of each tensor of a checkpoint that a rank takes, by our names of tensors.

- Queries, keys, values, gates and ups: rows of weights and of biases.
- Products into the residual stream: columns. Only rank 0 adds their bias.
- Embedding and head: rows, by ranges of the vocabulary.
- All other tensors are whole on each rank.

Experts are divided by their width, as feed-forward parts are; or, where the shard is ``by_expert``, into whole ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pagebus.actors.model.family import EXPERT_NAMES, NameMap
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.model.spec import Feed, Gqa, Mla, Moe

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"experts\.(\d+)\.")
OF_TOKENS = "embed_tokens.weight", "shared_head.head.weight"
"""What a layer that guesses may have of its own: an embedding and a head."""
GATES = tuple(name for names in EXPERT_NAMES for name in names[:2])
DOWNS = tuple(names[2] for names in EXPERT_NAMES)
"""Names of products of a feed-forward part: into its width, and out of it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """``ranges`` of the ``whole`` indexes of dimension ``dim``, in order. Without ranges, the rank has the tensor in
    its whole shape, full of zeros."""

    dim: int
    whole: int
    ranges: tuple[range, ...]

    @property
    def is_zero(self) -> bool:
        """Whether nothing of the stored tensor is taken."""
        return not self.ranges

    def stored_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape in files of a tensor that has the shape ``local`` on this rank."""
        if self.is_zero:
            return tuple(local)
        return (*local[: self.dim], self.whole, *local[self.dim + 1 :])


def cut_of(name: str, shard: Shard, names: NameMap) -> Cut | None:
    """The cut that the rank takes of a tensor, by our name of it; None: the whole tensor. Raises ModelError."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        vocab = shard.whole.vocab
        return Cut(0, vocab, (shard.of(vocab),))
    found = LAYER.fullmatch(name)
    if found is None or not shard.divides_layers:
        return None
    layer, part = shard.whole.layers[int(found[1])], found[2]
    if part in OF_TOKENS:
        return Cut(0, shard.whole.vocab, (shard.of(shard.whole.vocab),))
    if part.startswith("self_attn."):
        return _attention(part.removeprefix("self_attn."), layer.mixer, shard, names)
    if part.startswith("mlp."):
        return _feed(part.removeprefix("mlp."), layer.feed, shard, names)
    return None


def is_absent(name: str, shard: Shard) -> bool:
    """Whether a tensor, by our name of it, is of an expert of another rank alone."""
    found = LAYER.fullmatch(name)
    expert = None if found is None else EXPERT.match(found[2].removeprefix("mlp."))
    if not shard.by_expert or found is None or expert is None:
        return False
    feed = shard.whole.layers[int(found[1])].feed
    return isinstance(feed, Moe) and int(expert[1]) not in shard.of(feed.experts)


def _attention(part: str, mixer: Gqa, shard: Shard, names: NameMap) -> Cut | None:
    module, _, kind = part.rpartition(".")
    queries, keys = shard.heads(mixer), shard.kv_heads(mixer)
    if isinstance(mixer, Mla):
        return _latent(module, kind, mixer, queries, shard)
    size, width = mixer.head_dim, mixer.qk_norm == "width"
    query, key = mixer.heads * size, mixer.kv_heads * size
    if part == "sinks":
        return Cut(0, mixer.heads, (queries,))
    if module == "q_proj" or (module == "q_norm" and width):
        return Cut(0, query, (_times(queries, size),))
    if module in ("k_proj", "v_proj") or (module == "k_norm" and width):
        return Cut(0, key, (_times(keys, size),))
    if module == names.qkv:
        starts = (0, query, query + key)
        ranges = [_times(heads, size, start) for heads, start in zip((queries, keys, keys), starts, strict=True)]
        return Cut(0, query + 2 * key, _by_head(mixer, queries, keys) if names.qkv_by_head else tuple(ranges))
    return _into_residual(kind, query, _times(queries, size), shard) if module == "o_proj" else None


def _latent(module: str, kind: str, mixer: Mla, heads: range, shard: Shard) -> Cut | None:
    """Of latent attention: heads are divided, and latents are whole."""
    if module in ("q_proj", "q_b_proj"):
        return Cut(0, mixer.heads * mixer.query_dim, (_times(heads, mixer.query_dim),))
    if module == "kv_b_proj":
        return Cut(0, mixer.heads * mixer.expanded_dim, (_times(heads, mixer.expanded_dim),))
    own = _times(heads, mixer.v_head_dim)
    return _into_residual(kind, mixer.attended, own, shard) if module == "o_proj" else None


def _by_head(mixer: Gqa, queries: range, keys: range) -> tuple[range, ...]:
    """Rows of a tensor that has, for each head of keys, its queries, then that, then its values."""
    group, size = mixer.heads // mixer.kv_heads, mixer.head_dim
    found = []
    for key in keys:
        own = range(max(queries.start, key * group), min(queries.stop, (key + 1) * group))
        first = key * (group + 2)
        found.append(_times(range(own.start - key * group, own.stop - key * group), size, first * size))
        found.append(_times(range(group, group + 2), size, first * size))
    return tuple(found)


def _feed(part: str, feed: Feed, shard: Shard, names: NameMap) -> Cut | None:
    if part.startswith("shared_expert."):
        assert isinstance(feed, Moe)
        assert feed.shared is not None
        return _products(part.removeprefix("shared_expert."), feed.shared.width, shard, names.gate_up)
    if part.startswith("experts."):
        if shard.by_expert:
            assert isinstance(feed, Moe)
            return None if EXPERT.match(part) else Cut(0, feed.experts, (shard.of(feed.experts),))
        if EXPERT.match(part):
            return _products(EXPERT.sub("", part), feed.width, shard, None)
        return _stacked(part.removeprefix("experts."), feed.width, shard, names)
    return _products(part, feed.width, shard, names.gate_up)


def _products(part: str, width: int, shard: Shard, fused: str | None) -> Cut | None:
    """Of a feed-forward part, or of one expert."""
    module, _, kind = part.rpartition(".")
    own = shard.of(width)
    if module == fused:
        return Cut(0, 2 * width, (own, _times(own, 1, width)))
    if module in GATES:
        return Cut(0, width, (own,))
    return _into_residual(kind, width, own, shard) if module in DOWNS else None


def _stacked(part: str, width: int, shard: Shard, names: NameMap) -> Cut | None:
    """Of all experts in one tensor: [E, outputs, inputs], or [E, inputs, outputs] in files with columns first."""
    module, is_bias, own = part.removesuffix("_bias"), part.endswith("_bias"), shard.of(width)
    if module == "down_proj":
        return _into_residual("bias" if is_bias else "weight", width, own, shard, 1 if names.columns_first else 2)
    ranges = (_times(own, 2),) if names.gates_by_turns else (own, _times(own, 1, width))
    return Cut(2 if names.columns_first and not is_bias else 1, 2 * width, ranges)


def _into_residual(kind: str, width: int, own: range, shard: Shard, dim: int = 1) -> Cut | None:
    """Of a product whose ``width`` inputs lie in dimension ``dim``."""
    if kind == "bias":
        return None if shard.leads else Cut(0, 0, ())
    return Cut(dim, width, (own,))


def _times(indexes: range, size: int, start: int = 0) -> range:
    """Each index as ``size`` rows, behind ``start`` rows."""
    return range(start + indexes.start * size, start + indexes.stop * size)
