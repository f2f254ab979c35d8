"""The kernels of a step as one value, for the engine's metrics, its log at start, and ``pagebus explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import Dense, ModelSpec, Moe
from pagebus.kernels.attention.choice import AttentionChooser, AttentionPath, StepRows
from pagebus.kernels.linear.dispatch import (
    LinearChoice,
    Source,
    choose_invariant_product,
    choose_product,
    choose_residual_product,
)
from pagebus.kernels.linear.shapes import BUCKETS, FORMS, MANY, SPLIT_FORMS, Product, tokens_class
from pagebus.kernels.moe.choice import ExpertsChoice, Shape, choose_experts

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
    """Chooses for all steps of one engine."""

    def __init__(self, attention: AttentionChooser, config: ModelConfig) -> None:
        self.attention = attention
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
        config, setup = self._config, self.attention.setup
        (rows, heads), gated = attention_sizes(config), is_gated(config.spec)
        names, form = (PRODUCTS, "gated") if gated else (PLAIN_PRODUCTS, "plain")
        if setup.deterministic and setup.target is not None:
            forms = dict(zip(names, ("plain", "plain", form, "plain", "wide"), strict=True))
            counts = dict.fromkeys(names, num_tokens) | {"lm_head": num_sampled}
            return {name: choose_invariant_product(forms[name], counts[name], setup.dtype) for name in names}
        size, given = config.hidden_size, (setup.dtype, setup.target)
        adds, norms = added_at_once(config.spec)
        residual = partial(choose_residual_product, num_tokens, size, adds=adds, norms=norms)
        out = residual(heads, *given, biased=config.attention_out_bias)
        down = residual(config.intermediate_size, *given, biased=config.mlp_bias)
        half_normed = down.form == "residual"
        qkv = choose_product("plain", num_tokens, rows, size, *given, half_normed=half_normed)
        rows, half_normed = (1 + gated) * config.intermediate_size, out.form == "residual"
        gate_up = choose_product(form, num_tokens, rows, size, *given, half_normed=half_normed)
        head = choose_product("wide", num_sampled, config.vocab_size, size, *given)
        return dict(zip(names, (qkv, out, gate_up, down, head), strict=True))

    def _expert_products(self, moe: Moe, num_tokens: int, num_sampled: int) -> dict[str, Choice]:
        """Nothing here leaves half of a norm to the next product: the norm before experts is read by several."""
        config, setup = self._config, self.attention.setup
        size, (projected, attended) = config.hidden_size, attention_sizes(config)

        def product(form: str, rows: int, inputs: int, tokens: int = num_tokens) -> LinearChoice:
            if setup.deterministic and setup.target is not None:
                return choose_invariant_product(form, tokens, setup.dtype)
            return choose_product(form, tokens, rows, inputs, setup.dtype, setup.target)

        out = product("plain", size, attended)
        if not (setup.deterministic and setup.target is not None):
            biased, adds = config.attention_out_bias, added_at_once(config.spec)[0]
            out = choose_residual_product(
                num_tokens, size, attended, setup.dtype, setup.target, biased=biased, adds=adds, norms=False
            )
        router = product("wide", moe.experts + moe.shared_gate, size)
        head = product("wide", config.vocab_size, size, num_sampled)
        found = (product("plain", projected, size), out, router, self._experts(moe, num_tokens), head)
        products: dict[str, Choice] = dict(zip(EXPERT_PRODUCTS, found, strict=True))
        if moe.shared is None:
            return products
        width = moe.shared.width
        shared = product("gated", 2 * width, size), product("plain", size, width)
        return products | dict(zip(SHARED_PRODUCTS, shared, strict=True))

    def _experts(self, moe: Moe, num_tokens: int) -> ExpertsChoice:
        setup, shape = self.attention.setup, expert_shape(moe, self._config.hidden_size)
        return choose_experts(num_tokens, shape, setup.dtype, setup.target, invariant=setup.deterministic)

    def measurable(self) -> list[Product]:
        """The products of 16-bit weights whose launch shapes may be measured; of those that may do half of a norm, both
        forms, the one that it is compared with first."""
        found: dict[Product, None] = {}
        for tokens in BUCKETS:
            for choice in self.products(tokens, tokens).values():
                if not isinstance(choice, LinearChoice) or choice.product is None:
                    continue
                product = choice.product
                if product.form in SPLIT_FORMS:
                    found[product._replace(form="partial")] = None
                found[product] = None
        if added_at_once(self._config.spec)[1] and self._moe is None and not self.attention.setup.deterministic:
            found |= {each._replace(form="residual"): None for each in found if each.form == "partial"}
        return sorted(found, key=lambda product: FORMS.index(product.form))

    def estimated(self) -> dict[str, str]:
        """For each product that the cost model decided about, its kernels by tokens, with estimated microseconds."""
        lines: dict[str, list[str]] = {}
        for tokens in BUCKETS:
            for name, choice in self.products(tokens, tokens).items():
                if isinstance(choice, LinearChoice) and choice.source is Source.MODEL and choice.estimate is not None:
                    us = choice.estimate.library if choice.config is None else choice.estimate.us
                    lines.setdefault(name, []).append(f"{tokens}: {choice.kernel} {us:.1f} us")
        return {name: ", ".join(each) for name, each in lines.items()}

    def summary(self) -> dict[str, str]:
        """One line for the attention paths that steps may take, and one per product: its kernels, by tokens."""
        lines = {"attention": ", ".join(self.attention.possible)}
        by_tokens = {tokens: self.products(tokens, tokens) for tokens in (*BUCKETS, MANY)}
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


def added_at_once(spec: ModelSpec) -> tuple[bool, bool]:
    """Whether products of layers may add themselves to the residual stream, and do half of the norm that follows."""
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
    """What its launch shapes are chosen by."""
    return Shape(moe.experts, moe.top_k, hidden, moe.width)


def _span(first: int, last: int) -> str:
    if last == MANY:
        return "" if first == 1 else f" from {first} tokens"
    return f" {first}" if first == last else f" {first} to {last}"
