"""A family as data: what a decoder computes, layer by layer, as its ``config.json`` says it.

Nothing here imports torch: every actor may read a spec (the scheduler wants bytes per block), and only the executor
builds tensors from it. All are frozen and hashable; sizes are whole numbers of at least 1 unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "swiglu_clamped"]
Scores: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_top"]
NormPlaces: TypeAlias = Literal["pre", "post", "sandwich", "shared", "sum"]
"""Where a layer's norms N stand, f being attention and then the feed-forward part.

- ``pre``: x += f(N(x)).
- ``post``: x += N(f(x)).
- ``sandwich``: x += N'(f(N(x))).
- ``shared``: x += attention(N(x)) + feed(N(x)), one norm for both.
- ``sum``: x = N(x + f(x)), as in encoders.
"""
QkNorm: TypeAlias = Literal["none", "head", "width", "unit"]
"""Norms of queries and keys before they are rotated: over each head, or over all heads at once; ``unit``: over each
head and without weights, which is the same behind the rotation."""
RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
RopeLayout: TypeAlias = Literal["half", "pairs"]
"""What is rotated together: the i-th dimension and the i-th of the second half, or neighbours."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """``rms`` divides by the root of the mean square, ``layer`` takes the mean off first. The weight counts as
    ``offset`` + weight, in float32. ``wide``: that multiplies before the norm is rounded, as it does with an offset.
    ``bias``: one is added then."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: Literal[0, 1] = 0
    wide: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One table of angles. ``dims`` of each head turn, an even number; the others stay as they are.

    Pair i turns by ``base`` ** (-2 i / ``dims``) per token before ``kind`` stretches that, with ``factor`` and
    ``original`` (the positions of the first training). ``low`` and ``high`` bound what is blended: llama3's frequency
    factors, yarn's beta_slow and beta_fast. ``attention_factor`` multiplies cosines and sines. ``short`` and ``long``
    [dims / 2] divide longrope's frequencies: all of a process go by one of them, for its longest length.
    """

    dims: int
    base: float = 10000.0
    kind: RopeKind = "default"
    layout: RopeLayout = "half"
    factor: float = 1.0
    original: int = 0
    low: float = 0.0
    high: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + ``beta`` ln(1 + floor((p + ``shift``) / ``original``))."""

    beta: float
    original: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention. ``window`` 0: all tokens are seen; ``rope`` is an index into `ModelSpec.rope`, None:
    nothing turns. Scores are multiplied by ``scale``; ``softcap`` c makes each c tanh(s / c), 0: it does not. With a
    ``chunk``, positions are cut into runs of that many, a token sees its own run up to itself, and there is no
    window."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    rope: int | None = 0
    qk_norm: QkNorm = "none"
    softcap: float = 0.0
    sinks: bool = False
    bias: bool = False
    out_bias: bool = False
    position_scale: QueryScale | None = None
    chunk: int = 0

    @property
    def reach(self) -> int:
        """What is seen as one number, as kernels take it: the window, minus the chunk, or 0 for all."""
        return self.window or -self.chunk

    @property
    def rotary_dim(self) -> int:
        """Columns of the table of angles."""
        return self.head_dim

    @property
    def kv_parts(self) -> int:
        """Tensors of a layer in the cache: keys and values."""
        return 2

    @property
    def projected(self) -> int:
        """What the first product gives for each token: queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        """What attention gives for each token."""
        return self.heads * self.head_dim

    def weights(self, hidden: int) -> int:
        """Numbers in the matrices."""
        return hidden * (self.projected + self.attended)

    def flops_per_pair(self) -> int:
        """Operations for one query token and one key token, all heads."""
        return 4 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla(Gqa):
    """Multi-head latent attention. A token's latent, ``kv_rank`` numbers after a norm, holds the keys and values of all
    ``heads``; beside it lies one rotated key of ``rope_dim`` that they share. Both are what all heads read: of these
    there is one KV head, of ``head_dim`` = ``kv_rank`` + ``rope_dim``.

    A head's query has ``nope_dim`` numbers for its own part of the key and ``rope_dim`` for the shared one; its value
    has ``v_head_dim``. With a ``q_rank``, queries come from normed latents of that size (0: straight from the hidden
    state). ``bias`` is of the projections to latents, ``latent_eps`` that of the latents' norms.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    q_rank: int = 0
    latent_eps: float = 1e-6

    @property
    def rotary_dim(self) -> int:
        """Columns of the table of angles."""
        return self.rope_dim

    @property
    def kv_parts(self) -> int:
        """Tensors of a layer in the cache: values are the first ``kv_rank`` numbers of keys."""
        return 1

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Width of a head's part of the key, and of its value, as made from latents."""
        return self.nope_dim + self.v_head_dim

    @property
    def projected(self) -> int:
        """What the first product gives for each token: queries or their latents, latents and shared keys."""
        return (self.q_rank or self.heads * self.query_dim) + self.head_dim

    @property
    def attended(self) -> int:
        """What attention gives for each token."""
        return self.heads * self.v_head_dim

    def weights(self, hidden: int) -> int:
        """Numbers in the matrices."""
        inner = self.q_rank * self.heads * self.query_dim + self.kv_rank * self.heads * self.expanded_dim
        return hidden * (self.projected + self.attended) + inner

    def flops_per_pair(self) -> int:
        """Operations for one query token and one key token, all heads, over latents."""
        return 2 * self.heads * (self.head_dim + self.kv_rank)


@dataclass(frozen=True, slots=True)
class Dense:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not ``gated``."""

    width: int
    act: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture: each token goes to ``top_k`` of ``experts`` gated feed-forward parts of ``width``.

    ``score`` says what the router's logits become: ``softmax`` and ``sigmoid`` over all of them, before the choice;
    ``softmax_of_top`` over the chosen. ``renormalise`` divides by the sum of the chosen, ``factor`` multiplies then.
    With ``groups`` above 1, only experts of the best ``keep_groups`` groups are eligible: ``group_score`` says by what
    one is judged. ``router_bias`` is added to the logits, ``choice_bias`` (float32) to the scores for the choice alone.
    ``weight_on_input``: a token is multiplied by its weight before its expert, not behind it. ``limit`` clamps
    ``swiglu_clamped``, ``alpha`` is in its sigmoid. ``shared`` is a part for all tokens, ``shared_gate``: times
    sigmoid(x w). ``own``: which of the experts a rank has; None: all.
    """

    experts: int
    top_k: int
    width: int
    act: Activation = "silu"
    score: Scores = "softmax"
    renormalise: bool = True
    factor: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    router_bias: bool = False
    choice_bias: bool = False
    bias: bool = False
    weight_on_input: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    shared: Dense | None = None
    shared_gate: bool = False
    own: range | None = None

    @property
    def here(self) -> range:
        """The experts whose weights are here, in their numbers among all."""
        return range(self.experts) if self.own is None else self.own


Feed: TypeAlias = Dense | Moe


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: ``mixer`` lets tokens see each other, ``feed`` does not. What both add to the residual stream is
    multiplied by ``residual_scale``."""

    mixer: Gqa
    feed: Feed
    norms: NormPlaces = "pre"
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Logits are the product with the head (the embedding's matrix if ``tied``) times ``scale``; ``softcap`` c then
    makes each c tanh(l / c), 0: it does not."""

    tied: bool
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """All tokens see each other. Added to their embeddings are those of their positions (a table of ``positions`` rows,
    of which the first token has number ``first``) and of their segments (of ``types``); a norm follows."""

    positions: int
    first: int
    types: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: embedding times ``embed_scale``, the layers, a last norm, the head. ``norm`` is the kind of all norms
    of the hidden size, and of those of heads. With ``encoder`` it is an encoder, which has no head."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    head: HeadSpec
    rope: tuple[RopeSpec, ...] = ()
    embed_scale: float = 1.0
    encoder: EncoderSpec | None = None

    def kv_numbers(self) -> int:
        """Numbers that a token has in the cache: keys and values of all layers."""
        return sum(layer.mixer.kv_parts * layer.mixer.kv_heads * layer.mixer.head_dim for layer in self.layers)

    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers by which a token is multiplied; of a mixture those of its experts."""
        return sum(layer.mixer.weights(self.hidden) + _feed_weights(layer.feed, self.hidden) for layer in self.layers)


def expert_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Which layers have experts."""
    return tuple(index for index, layer in enumerate(spec.layers) if isinstance(layer.feed, Moe))


def _feed_weights(feed: Feed, hidden: int) -> int:
    if isinstance(feed, Dense):
        return (3 if feed.gated else 2) * hidden * feed.width
    shared = 0 if feed.shared is None else _feed_weights(feed.shared, hidden)
    chosen = 3 * feed.top_k * feed.width * len(feed.here) // feed.experts  # in the mean, of those that are here
    return hidden * (feed.experts + chosen) + shared
