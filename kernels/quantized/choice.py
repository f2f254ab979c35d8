"""Chooses what multiplies by a quantized weight, by tokens, sizes and layout: as measured where it was, else by a rule,
unless the cost model finds something clearly faster.

The rules for 8 bits are in `pagebus.kernels.quantized.byte_choice`, those for words of 4 bits in
`pagebus.kernels.quantized.word_choice`. Of both:

- products into the residual of up to 16 tokens do half of the next norm, as they do in 16 bits;
- activations are rounded where the checkpoint was made for that, a GPU multiplies the format, and there are several
  tokens; blocks of 128 columns round groups of as many, up to 256 tokens;
- above 256 tokens, the library multiplies 8 bits by 8 bits where activations may be rounded. Other weights are
  dequantized into a scratch for its product of 16 bits; words of 4 bits from where that is faster than to widen them.
"""

from __future__ import annotations

import torch

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import until_tables_change
from pagebus.kernels.linear.dispatch import LinearChoice, Source, measured
from pagebus.kernels.linear.shapes import BUCKETS, MANY, PROMPTS, Config, LinearKernel, Product, kernel_of, tokens_class
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.byte_choice import choose_of_bytes
from pagebus.kernels.quantized.coding import Kind
from pagebus.kernels.quantized.costs import QuantizedCosts
from pagebus.kernels.quantized.library import fits_scratch
from pagebus.kernels.quantized.word_choice import few_config, library_is_faster, widening_config, word_config
from pagebus.kernels.specialized.hopper_words import WideningConfig

MOST_OF_RESIDUALS = 16
MOST_OF_WORDS = 32
"""Tokens of a tile of words whose zeros are taken off sums, `pagebus.kernels.coded.word_tiles`: wider tiles take them
off each number."""
LEAST_OF_E4M3 = 89
"""The compute capability from which on float8 is multiplied."""
MARGIN = 0.7
"""The rule keeps its place unless the cost model's best is below this share of it: an estimate is off by 12% in the
mean, and the rule was made from times."""
OTHER = "other"
"""How a layout is called that no kernel reads."""


def choose_quantized(
    form: str, num_tokens: int, num_rows: int, num_inputs: int, kind: Kind | None, dtype: torch.dtype,
    target: Target | None, *, half_normed: bool = False,
) -> LinearChoice:  # fmt: skip
    """The kernel for x [T, K] times a quantized weight [N, K] of this kind (None: no kernel reads it)."""
    return _choose(form, num_rows, num_inputs, tokens_class(num_tokens), kind, dtype, target, half_normed)


def choose_quantized_residual(
    num_tokens: int, num_rows: int, num_inputs: int, kind: Kind | None, dtype: torch.dtype, target: Target | None, *,
    biased: bool = False, norms: bool = True,
) -> LinearChoice:  # fmt: skip
    """The same for a product into the residual, which with ``norms`` may do half of the following norm."""
    if norms and num_tokens <= MOST_OF_RESIDUALS and dtype == torch.bfloat16:
        begun = choose_quantized("residual", num_tokens, num_rows, num_inputs, kind, dtype, target)
        if begun.config is not None:
            return begun
    form = "plain" if biased else "partial"
    chosen = choose_quantized(form, num_tokens, num_rows, num_inputs, kind, dtype, target)
    cut = isinstance(chosen.config, TileConfig | WideningConfig) and chosen.config.splits > 1
    return chosen if cut else chosen._replace(form="plain")


def choose_quantized_invariant(
    form: str, num_tokens: int, kind: Kind | None, dtype: torch.dtype, target: Target | None
) -> LinearChoice:
    """The same with ``--deterministic``."""
    why = "--deterministic: one order of sums for any number of tokens"
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU")
    if kind is None or dtype.itemsize > 2:
        return LinearChoice(LinearKernel.DEQUANTIZED, form, None, why)
    return LinearChoice(LinearKernel.SKINNY_GEMM, form, invariant_config(num_tokens, kind), why)


def invariant_config(num_tokens: int, kind: Kind) -> TileConfig:
    """A launch shape with which a token's result is the same for any number of tokens: only the width of tiles
    differs."""
    most = MOST_OF_WORDS if kind.code.in_words else 64
    tokens = next(width for width in (16, 32, 64) if num_tokens <= width or width == most)
    return TileConfig(64, tokens, kind.depth, 3, 4)


@until_tables_change
def _choose(
    form: str, num_rows: int, num_inputs: int, tokens: int, kind: Kind | None, dtype: torch.dtype,
    target: Target | None, half_normed: bool,
) -> LinearChoice:  # fmt: skip
    product = Product(form, num_rows, num_inputs, OTHER if kind is None else kind.name)
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU", product=product)
    library, why = _library(product, kind, dtype, target)
    if kind is None or dtype.itemsize > 2 or not 0 < tokens < MANY:
        prompts = _of_prompts(product, tokens, kind, dtype, target) if tokens >= PROMPTS else None
        return prompts or LinearChoice(library, form, None, why, product=product)
    rounded = _rounds(product, kind, dtype, target)
    kind = kind._replace(rounded=rounded)
    product = product._replace(layout=kind.name)  # tables and estimates are of what runs
    found = measured(product, tokens, target)
    if found is not None:
        config, source = found
        why = f"{source}: {'the library was' if config is None else 'this was'} fastest"
    else:
        config, source = _rule(product, tokens, kind, target, rounded=rounded), Source.RULE
        librarys = config is None and (library is not LinearKernel.DEQUANTIZED or tokens > BUCKETS[-1])
        why = why if librarys else _why(config)
        if config is not None and tokens <= BUCKETS[-1]:
            config, source, why = _modelled(product, tokens, kind, target, config, why)
    if half_normed and (config is None or isinstance(config, WideningConfig)):
        ours = _ours(product, tokens, kind, target) if tokens <= BUCKETS[-1] else None
        config, source, why = ours, Source.RULE, "completes a norm"
    return LinearChoice(library if config is None else kernel_of(config), form, config, why, source, product)


def _of_prompts(
    product: Product, tokens: int, kind: Kind | None, dtype: torch.dtype, target: Target
) -> LinearChoice | None:
    """Our kernel of prompts for what is dequantized before, where tables have it: of dense weights too, because the
    same is left to do for either."""
    if kind is None or dtype.itemsize > 2 or product.form != "gated" or not fits_scratch(product):
        return None
    if _rounds(product, kind, dtype, target):
        return None
    for each in (product._replace(layout=layout) for layout in (kind._replace(rounded=False).name, "")):
        found = measured(each, tokens, target)
        if found is not None and found[0] is not None:
            config, source = found
            why = f"{source}: this was fastest"
            return LinearChoice(LinearKernel.HOPPER_PROMPTS, product.form, config, why, source, each)
    return None


def _modelled(
    product: Product, tokens: int, kind: Kind, target: Target, rule: Config, why: str
) -> tuple[Config, Source, str]:
    """The rule's launch shape, unless estimates say that another is clearly faster."""
    costs = costs_of(target)
    own, best = costs.own(product, tokens, kind, rule), costs.ranked(product, tokens, kind, 1)
    if own is None or not best or best[0][0] >= MARGIN * own:
        return rule, Source.RULE, why
    us, config = best[0]
    return config, Source.MODEL, f"{Source.MODEL}: should take {us:.1f} µs, the rule's {own:.1f}"


@until_tables_change
def costs_of(target: Target) -> QuantizedCosts:
    """The cost model of a kind of GPU."""
    return QuantizedCosts(target)


def _library(product: Product, kind: Kind | None, dtype: torch.dtype, target: Target) -> tuple[LinearKernel, str]:
    """What multiplies many tokens, and why."""
    if kind is None:
        return LinearKernel.DEQUANTIZED, "no kernel reads this layout"
    if dtype.itemsize > 2:
        return LinearKernel.DEQUANTIZED, "not in 16 bits"
    if product.form == "wide":
        return LinearKernel.DEQUANTIZED, "the result is wanted in float32"
    if not _is_aligned(product):
        return LinearKernel.DEQUANTIZED, "odd sizes"
    if not kind.rounded or kind.width:
        return LinearKernel.DEQUANTIZED, "activations stay as they are"
    if not _rounds(product, kind, dtype, target):
        return LinearKernel.DEQUANTIZED, "the library's float8 needs bfloat16 and a newer GPU"
    if kind.code == Code.INT8:
        return LinearKernel.INT_MM, "activations are rounded to int8"
    return LinearKernel.SCALED_MM, "activations are rounded to float8"


def _is_aligned(product: Product) -> bool:
    return product.rows % 16 == 0 and product.inputs % 16 == 0


def _rounds(product: Product, kind: Kind, dtype: torch.dtype, target: Target) -> bool:
    """Whether activations of several tokens are rounded to the format of the weight."""
    return rounds_to(kind, dtype, target) and product.form != "wide" and _is_aligned(product)


def rounds_to(kind: Kind, dtype: torch.dtype, target: Target) -> bool:
    """Whether activations of ``dtype`` may be rounded to the numbers of a weight, and a GPU multiplies these."""
    float8 = target.capability >= LEAST_OF_E4M3 and dtype == torch.bfloat16
    return kind.rounded and (kind.code == Code.INT8 or float8)


def _why(config: Config | None) -> str:
    if config is None:
        return "a rule: few tiles of many tokens"
    rule = "a rule, from times on an H200"
    return f"{rule}; tokens are rounded to 8 bits" if isinstance(config, TileConfig) and config.rounded else rule


def _rule(product: Product, tokens: int, kind: Kind, target: Target, *, rounded: bool) -> Config | None:
    wide = tokens > BUCKETS[-1]
    if not kind.code.in_words:
        return None if wide else choose_of_bytes(product, tokens, kind, target, rounded=rounded)
    widening = widening_config(product, tokens, kind, target)
    if wide or widening is not None or library_is_faster(product, tokens, kind, target):
        return widening
    return _ours(product, tokens, kind, target)


def _ours(product: Product, tokens: int, kind: Kind, target: Target) -> Config | None:
    """A kernel of ours that completes norms, and does not round activations."""
    if kind.code.in_words:
        return few_config(product, tokens, kind, target) or word_config(product, tokens, kind, target)
    return choose_of_bytes(product, tokens, kind, target, rounded=False)
