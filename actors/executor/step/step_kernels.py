"""The kernels of a step as one value, for the engine's metrics, its log at start, and ``pagebus explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import ModelSpec
from pagebus.kernels.attention.choice import AttentionChooser, AttentionPath, StepRows
from pagebus.kernels.linear.dispatch import (
    BUCKETS,
    MANY,
    LinearChoice,
    choose_invariant_product,
    choose_product,
    choose_residual_product,
    tokens_class,
)

PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
"""The matrix products of a model: those of each layer but the first and the last, and the head."""


@dataclass(frozen=True, slots=True, eq=False)
class StepKernels:
    """The kernels of a step: its attention path, and the kernel of each of the `PRODUCTS`. Steps with equal kernels
    share one object."""

    attention: AttentionPath
    products: Mapping[str, LinearChoice]


class KernelChooser:
    """Chooses for all steps of one engine."""

    def __init__(self, attention: AttentionChooser, config: ModelConfig) -> None:
        self.attention = attention
        self._config = config
        self._chosen: dict[tuple[AttentionPath, int, int], StepKernels] = {}

    def choose(self, rows: StepRows, num_tokens: int, num_sampled: int) -> StepKernels:
        """The kernels of a step of this many tokens, of which ``num_sampled`` go through the head; padding included."""
        key = self.attention.choose(rows), tokens_class(num_tokens), tokens_class(num_sampled)
        if key not in self._chosen:
            self._chosen[key] = StepKernels(key[0], self.products(num_tokens, num_sampled))
        return self._chosen[key]

    def products(self, num_tokens: int, num_sampled: int) -> dict[str, LinearChoice]:
        """The kernel of each product, given what the product before leaves to it."""
        config, setup = self._config, self.attention.setup
        heads = config.num_heads * config.head_dim
        if setup.deterministic and setup.target is not None:
            forms = dict(zip(PRODUCTS, ("plain", "plain", "gated", "plain", "wide"), strict=True))
            counts = dict.fromkeys(PRODUCTS, num_tokens) | {"lm_head": num_sampled}
            return {name: choose_invariant_product(forms[name], counts[name], setup.dtype) for name in PRODUCTS}
        size, given = config.hidden_size, (setup.dtype, setup.target)
        adds, norms = added_at_once(config.spec)
        residual = partial(choose_residual_product, num_tokens, size, adds=adds, norms=norms)
        out = residual(heads, *given, biased=config.attention_out_bias)
        down = residual(config.intermediate_size, *given, biased=config.mlp_bias)
        rows = heads + 2 * config.num_kv_heads * config.head_dim
        half_normed = down.form == "residual"
        qkv = choose_product("plain", num_tokens, rows, size, *given, half_normed=half_normed)
        rows, half_normed = 2 * config.intermediate_size, out.form == "residual"
        gate_up = choose_product("gated", num_tokens, rows, size, *given, half_normed=half_normed)
        head = choose_product("wide", num_sampled, config.vocab_size, size, *given)
        return dict(zip(PRODUCTS, (qkv, out, gate_up, down, head), strict=True))

    def summary(self) -> dict[str, str]:
        """One line for the attention paths that steps may take, and one per product: its kernels, by tokens."""
        lines = {"attention": ", ".join(self.attention.possible)}
        by_tokens = {tokens: self.products(tokens, tokens) for tokens in (*BUCKETS, MANY)}
        for name in PRODUCTS:
            runs: list[tuple[str, int, int]] = []
            for tokens, products in by_tokens.items():
                kernel = products[name].kernel
                if runs and runs[-1][0] == kernel:
                    runs[-1] = kernel, runs[-1][1], tokens
                else:
                    runs.append((kernel, runs[-1][2] + 1 if runs else 1, tokens))
            lines[name] = ", ".join(f"{kernel}{_span(first, last)}" for kernel, first, last in runs)
        return lines


def added_at_once(spec: ModelSpec) -> tuple[bool, bool]:
    """Whether products of layers may add themselves to the residual stream, and do half of the norm that follows."""
    adds = all(layer.norms in ("pre", "shared") and layer.residual_scale == 1.0 for layer in spec.layers)
    halved = spec.norm.kind == "rms" and not spec.norm.offset and not spec.norm.wide
    return adds, adds and halved and all(layer.norms == "pre" for layer in spec.layers)


def _span(first: int, last: int) -> str:
    if last == MANY:
        return "" if first == 1 else f" from {first} tokens"
    return f" {first}" if first == last else f" {first} to {last}"
