"""The kernels of a step as one value, for the engine's metrics, its log at start, and ``pagebus explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pagebus.actors.executor.layers.moe import EXPERT_WEIGHTS
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import Dense, ModelSpec, Moe
from pagebus.kernels.attention.choice import AttentionChooser, AttentionPath, StepRows
from pagebus.kernels.attention.forms.choice import FormChoice, choose_form
from pagebus.kernels.attention.forms.form import DecodeHeads
from pagebus.kernels.linear.dispatch import (
    LinearChoice,
    Source,
    choose_invariant_product,
    choose_product,
    choose_residual_product,
)
from pagebus.kernels.linear.shapes import (
    BUCKETS,
    FORMS,
    MANY,
    PROMPT_BUCKETS,
    PROMPTS,
    SPLIT_FORMS,
    WIDE_BUCKETS,
    Product,
    tokens_class,
)
from pagebus.kernels.moe.choice import ExpertsChoice, choose_experts, token_counts
from pagebus.kernels.moe.launch.shapes import Shape, brought_here
from pagebus.kernels.quantized.choice import (
    OTHER,
    choose_quantized,
    choose_quantized_invariant,
    choose_quantized_residual,
)
from pagebus.kernels.quantized.coding import Kind
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts

PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
"""The matrix products of a model: those of each layer but the first and the last, and the head."""
PLAIN_PRODUCTS = ("qkv", "o", "up", "down", "lm_head")
"""Those of a model whose feed-forward parts have no gate."""
EXPERT_PRODUCTS = ("qkv", "o", "router", "experts", "lm_head")
SHARED_PRODUCTS = ("shared_gate_up", "shared_down")
"""Those of a model with experts: of the layers that have some, and with the latter if an expert is shared."""


Choice: TypeAlias = LinearChoice | ExpertsChoice


@dataclass(frozen=True, slots=True, eq=False)
class StepKernels:
    """The kernels of a step: its attention path, and the kernel of each of the `PRODUCTS`, or of those of a model with
    experts. Steps with equal kernels share one object."""

    attention: AttentionPath
    products: Mapping[str, Choice]


class KernelChooser:
    """Chooses for all steps of one engine. ``kinds``: how quantized weights are, by product."""

    def __init__(
        self, attention: AttentionChooser, config: ModelConfig, kinds: Mapping[str, Kind | None] | None = None
    ) -> None:
        self.attention = attention
        self._kinds = kinds or {}
        self._config = config
        self._moe = moe_of(config.spec)
        self._chosen: dict[tuple[AttentionPath, int, int, ExpertsChoice | None], StepKernels] = {}

    def choose(self, rows: StepRows, num_tokens: int, num_sampled: int) -> StepKernels:
        """The kernels of a step of this many tokens, of which ``num_sampled`` go through the head; padding included."""
        experts = None if self._moe is None else self._experts(self._moe, num_tokens)
        key = self.attention.choose(rows), tokens_class(num_tokens), tokens_class(num_sampled), experts
        if key not in self._chosen:
            self._chosen[key] = StepKernels(key[0], self.products(num_tokens, num_sampled))
        return self._chosen[key]

    def products(self, num_tokens: int, num_sampled: int) -> Mapping[str, Choice]:
        """The kernel of each product, given what the product before leaves to it."""
        if self._moe is not None:
            return self._expert_products(self._moe, num_tokens, num_sampled)
        return self._dense_products(num_tokens, num_sampled)

    def _dense_products(self, num_tokens: int, num_sampled: int) -> dict[str, LinearChoice]:
        config = self._config
        (rows, heads), gated = attention_sizes(config), is_gated(config.spec)
        names, form = (PRODUCTS, "gated") if gated else (PLAIN_PRODUCTS, "plain")
        adds, norms = added_at_once(config)
        size, width, limits = config.hidden_size, config.intermediate_size, {"adds": adds, "norms": norms}
        out = self._residual("o", num_tokens, size, heads, biased=config.attention_out_bias, **limits)
        down = self._residual("down", num_tokens, size, width, biased=config.mlp_bias, **limits)
        qkv = self._product("qkv", "plain", num_tokens, rows, size, half_normed=down.form == "residual")
        rows, half_normed = (1 + gated) * width, out.form == "residual"
        gate_up = self._product(names[2], form, num_tokens, rows, size, half_normed=half_normed)
        head = self._product("lm_head", "wide", num_sampled, head_rows(config), size)
        return dict(zip(names, (qkv, out, gate_up, down, head), strict=True))

    def _expert_products(self, moe: Moe, num_tokens: int, num_sampled: int) -> dict[str, Choice]:
        """Nothing here leaves half of a norm to the next product: the norm before experts is read by several."""
        config, size, (projected, attended) = self._config, self._config.hidden_size, attention_sizes(self._config)
        biased, adds = config.attention_out_bias, added_at_once(config)[0]
        found = (
            self._product("qkv", "plain", num_tokens, projected, size),
            self._residual("o", num_tokens, size, attended, biased=biased, adds=adds, norms=False),
            self._product("router", "wide", num_tokens, moe.experts + moe.shared_gate, size),
            self._experts(moe, num_tokens),
            self._product("lm_head", "wide", num_sampled, head_rows(config), size),
        )
        products: dict[str, Choice] = dict(zip(EXPERT_PRODUCTS, found, strict=True))
        if moe.shared is None:
            return products
        gate_up, down = SHARED_PRODUCTS
        return products | {
            gate_up: self._product(gate_up, "gated", num_tokens, 2 * moe.shared.width, size),
            down: self._product(down, "plain", num_tokens, size, moe.shared.width),
        }

    def _product(
        self, name: str, form: str, num_tokens: int, rows: int, inputs: int, *, half_normed: bool = False
    ) -> LinearChoice:
        """Of the product with this ``name``."""
        setup = self.attention.setup
        dtype, target = setup.dtype, setup.target
        fixed = setup.deterministic and target is not None
        if name not in self._kinds:
            if fixed:
                return choose_invariant_product(form, num_tokens, dtype)
            return choose_product(form, num_tokens, rows, inputs, dtype, target, half_normed=half_normed)
        kind = self._kinds[name]
        if fixed:
            return choose_quantized_invariant(form, num_tokens, kind, dtype, target)
        return choose_quantized(form, num_tokens, rows, inputs, kind, dtype, target, half_normed=half_normed)

    def _residual(
        self, name: str, num_tokens: int, rows: int, inputs: int, *, biased: bool, adds: bool, norms: bool
    ) -> LinearChoice:
        """Of one that goes into the residual."""
        setup = self.attention.setup
        given = num_tokens, rows, inputs
        if setup.deterministic and setup.target is not None:
            return self._product(name, "plain", *given)
        if name not in self._kinds:
            return choose_residual_product(*given, setup.dtype, setup.target, biased=biased, adds=adds, norms=norms)
        kind = self._kinds[name]
        norms = adds and norms
        return choose_quantized_residual(*given, kind, setup.dtype, setup.target, biased=biased, norms=norms)

    def _experts(self, moe: Moe, num_tokens: int) -> ExpertsChoice:
        setup = self.attention.setup
        num_tokens, shape = brought_here(num_tokens, expert_shape(moe, self._config.hidden_size), moe.experts)
        if EXPERT_WEIGHTS[0] in self._kinds:
            kinds = self._kinds[EXPERT_WEIGHTS[0]], self._kinds[EXPERT_WEIGHTS[1]]
            return choose_quantized_experts(
                num_tokens, shape, kinds, setup.dtype, setup.target, invariant=setup.deterministic
            )
        return choose_experts(num_tokens, shape, setup.dtype, setup.target, invariant=setup.deterministic)

    def expert_counts(self, most: int) -> list[int]:
        """Numbers of tokens up to ``most`` at which experts take other kernels, whose rows are as many as all of a
        step."""
        if self._moe is None:
            return []
        setup, shape = self.attention.setup, expert_shape(self._moe, self._config.hidden_size)
        return token_counts(shape, most, setup.dtype, setup.target, self._moe.experts)

    def wide_counts(self) -> list[int]:
        """Numbers of tokens above those of `BUCKETS` at which a product of a quantized weight has a kernel of ours."""
        return [
            tokens
            for tokens in WIDE_BUCKETS
            if any(
                isinstance(choice, LinearChoice) and choice.config is not None and choice.product is not None
                for choice in self.products(tokens, tokens).values()
            )
        ]

    def measurable(self) -> list[Product]:
        """The products whose launch shapes may be measured in 16 bits, and of quantized weights that kernels read; of
        those that may do half of a norm, both forms, the one that it is compared with first."""
        found: dict[Product, None] = {}
        for tokens in BUCKETS:
            for choice in self.products(tokens, tokens).values():
                if not isinstance(choice, LinearChoice) or choice.product is None or choice.product.layout == OTHER:
                    continue
                product = choice.product
                if product.form in SPLIT_FORMS:
                    found[product._replace(form="partial")] = None
                found[product] = None
        if added_at_once(self._config)[1] and self._moe is None and not self.attention.setup.deterministic:
            found |= {each._replace(form="residual"): None for each in found if each.form == "partial"}
        return sorted(found, key=lambda product: FORMS.index(product.form))

    def measurable_experts(self) -> Shape | None:
        """The experts whose launch shapes may be measured in 16 bits, if there are any that are not quantized."""
        if self._moe is None or EXPERT_WEIGHTS[0] in self._kinds or self.attention.setup.deterministic:
            return None
        return expert_shape(self._moe, self._config.hidden_size)

    def decode_form(self, num_rows: int) -> FormChoice | None:
        """In which so many decodes attend; None: there is one form only."""
        heads = self.measurable_heads()
        return None if heads is None else choose_form(num_rows, heads, self.attention.setup.target)

    def measurable_heads(self) -> DecodeHeads | None:
        """Those whose decodes may be measured in 16 bits."""
        setup = self.attention.setup
        if setup.latent or setup.deterministic or setup.dtype.itemsize > 2:
            return None
        group = setup.q_heads // setup.kv_heads
        return DecodeHeads(setup.kv_heads, group, setup.head_dim, setup.cache_dtype.itemsize)

    def estimated(self) -> dict[str, str]:
        """For each product that the cost model decided about, its kernels by tokens, with estimated microseconds."""
        lines: dict[str, list[str]] = {}
        for tokens in BUCKETS:
            for name, choice in self.products(tokens, tokens).items():
                if isinstance(choice, LinearChoice) and choice.source is Source.MODEL and choice.estimate is not None:
                    us = choice.estimate.library if choice.config is None else choice.estimate.us
                    lines.setdefault(name, []).append(f"{tokens}: {choice.kernel} {us:.1f} us")
                elif isinstance(choice, ExpertsChoice) and choice.us is not None:
                    lines.setdefault(name, []).append(f"{tokens}: {choice.kernel} {choice.us:.1f} us")
        return {name: ", ".join(each) for name, each in lines.items()}

    def summary(self) -> dict[str, str]:
        """One line for the attention paths that steps may take, and one per product: its kernels, by tokens."""
        lines = {"attention": ", ".join(self.attention.possible)}
        lasts = {MANY: PROMPTS - 1, PROMPTS: PROMPT_BUCKETS[1] - 1}
        counts = (*BUCKETS, *WIDE_BUCKETS, MANY, *PROMPT_BUCKETS)
        by_tokens = {lasts.get(tokens, tokens): self.products(tokens, tokens) for tokens in counts}
        for name in by_tokens[1]:
            runs: list[tuple[str, int, int]] = []
            for tokens, products in by_tokens.items():
                kernel = products[name].kernel
                if runs and runs[-1][0] == kernel:
                    runs[-1] = kernel, runs[-1][1], tokens
                else:
                    runs.append((kernel, runs[-1][2] + 1 if runs else 1, tokens))
            lines[name] = ", ".join(f"{kernel}{_span(first, last)}" for kernel, first, last in runs)
        return lines


def attention_sizes(config: ModelConfig) -> tuple[int, int]:
    """What the product before attention gives for each token, and what the product behind it takes."""
    if config.latent is not None:
        return config.latent.projected, config.latent.attended
    heads = config.num_heads * config.head_dim
    return heads + 2 * config.num_kv_heads * config.head_dim, heads


def head_rows(config: ModelConfig) -> int:
    """The tokens whose logits are computed; of a rank those of its part."""
    return config.vocab_size if config.shard is None else len(config.shard.of(config.vocab_size))


def added_at_once(config: ModelConfig) -> tuple[bool, bool]:
    """Whether products of layers may add themselves to the residual stream, and do half of the norm that follows. What
    ranks compute is summed over them before."""
    spec = config.spec
    if config.shard is not None:
        return False, False
    adds = all(layer.norms in ("pre", "shared") and layer.residual_scale == 1.0 for layer in spec.layers)
    halved = spec.norm.kind == "rms" and not spec.norm.offset and not spec.norm.wide
    return adds, adds and halved and all(layer.norms == "pre" for layer in spec.layers)


def is_gated(spec: ModelSpec) -> bool:
    """Whether the dense feed-forward parts have gates."""
    return all(layer.feed.gated for layer in spec.layers if isinstance(layer.feed, Dense))


def moe_of(spec: ModelSpec) -> Moe | None:
    """The mixture of the layers that have one; None: all are dense."""
    return next((layer.feed for layer in spec.layers if isinstance(layer.feed, Moe)), None)


def expert_shape(moe: Moe, hidden: int) -> Shape:
    """Its experts that are here, of which a token may get all that it chooses."""
    return Shape(len(moe.here), moe.top_k, hidden, moe.width)


def _span(first: int, last: int) -> str:
    if last == PROMPT_BUCKETS[-1]:
        return "" if first == 1 else f" from {first} tokens"
    return f" {first}" if first == last else f" {first} to {last}"
