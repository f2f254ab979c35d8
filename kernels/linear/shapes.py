"""Launch shapes of products, and the names of products, kernels and buckets by which they are chosen and stored."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any, NamedTuple

from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.library_parts import ALIGNED, LibraryConfig
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.specialized.hopper_few import MOST_TOKENS, FewConfig
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig

DenseConfig = TileConfig | VectorConfig | SpecializedConfig
"""For weights of 16 bits; tiles and vectors for quantized ones too."""
Config = DenseConfig | WideningConfig | FewConfig | PromptConfig | LibraryConfig

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Buckets of token counts. A choice holds for its bucket's count and fewer, down to the next bucket. Above the last one
the library multiplies weights of 16 and of 8 bits."""
WIDE_BUCKETS = (384, 512, 768, 1024)
"""Buckets above those, for words of 4 bits. Above the last one the library wins, but for prompts."""
MANY = WIDE_BUCKETS[-1] + 1
"""Stands for token counts above the buckets, and below those of prompts."""
PROMPTS = 4096
"""Stands for this token count and more: for steps full of prompts."""
PROMPT_BUCKETS = (PROMPTS, 8192)
"""Each stands for its token count and all above, up to the next. Where a table lacks the second, the first holds."""
FORMS = ("plain", "wide", "gated", "partial", "residual")
"""What becomes of a product: see `pagebus.kernels.linear.linear`."""
SPLIT_FORMS = ("partial", "residual")
"""Those of which sums over parts of K are added up by someone."""
FEWEST_OF_PARTS = 64
"""Tokens above which the library may multiply in parts."""
ROUNDED = "-rounded"
"""How names of layouts end whose activations may be rounded to the same 8 bits."""


class LinearKernel(StrEnum):
    """The kernels that multiply. From `CUBLAS_PARTS` on, the library does: 16 bits with K in parts, and whole;
    `TORCH` on a CPU; quantized weights as float8 and int8, times activations rounded to that, or dequantized before."""

    GEMV = "gemv"
    SKINNY_GEMM = "skinny_gemm"
    HOPPER_GEMM = "hopper_gemm"
    HOPPER_WORDS = "hopper_words"
    HOPPER_FEW = "hopper_few"
    HOPPER_PROMPTS = "hopper_prompts"
    CUBLAS_PARTS = "cublas_parts"
    CUBLAS = "cublas"
    TORCH = "torch"
    SCALED_MM = "scaled_mm"
    INT_MM = "int_mm"
    DEQUANTIZED = "dequantized"


KERNELS: dict[type[Config], LinearKernel] = {
    VectorConfig: LinearKernel.GEMV,
    TileConfig: LinearKernel.SKINNY_GEMM,
    SpecializedConfig: LinearKernel.HOPPER_GEMM,
    WideningConfig: LinearKernel.HOPPER_WORDS,
    FewConfig: LinearKernel.HOPPER_FEW,
    PromptConfig: LinearKernel.HOPPER_PROMPTS,
    LibraryConfig: LinearKernel.CUBLAS_PARTS,
}
"""The kernel of each type of launch shape."""
CONFIGS = {kernel: config for config, kernel in KERNELS.items()}


class Product(NamedTuple):
    """``form``, the shape of the weights [rows, inputs], and how they are quantized, if they are (``int4-1x128``)."""

    form: str
    rows: int
    inputs: int
    layout: str = ""

    @classmethod
    def parse(cls, text: str) -> Product:
        """``gated:28672x4096``, or ``gated:28672x4096:fp8``.

        Raises:
            ValueError: another form.
        """
        form, _, shape = text.partition(":")
        shape, _, layout = shape.partition(":")
        rows, _, inputs = shape.partition("x")
        if form not in FORMS:
            raise ValueError(f"{form} is none of {', '.join(FORMS)}")
        return cls(form, int(rows), int(inputs), layout)

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.form}:{self.rows}x{self.inputs}{self.layout and ':'}{self.layout}"


def kernel_of(config: Config) -> LinearKernel:
    """Whose launch shape this is."""
    return KERNELS[type(config)]


def whole(config: TileConfig | SpecializedConfig | WideningConfig | PromptConfig | LibraryConfig) -> Config | None:
    """The same with K in one part; None: the library."""
    return None if isinstance(config, LibraryConfig) else replace(config, splits=1)


def is_legal(product: Product, bucket: int, config: Config) -> bool:
    """Whether a launch shape can compute this product of ``bucket`` tokens."""
    if bucket in PROMPT_BUCKETS or isinstance(config, PromptConfig):
        ours = isinstance(config, PromptConfig) and config.fits(product.inputs)
        return ours and bucket in PROMPT_BUCKETS and product.form == "gated" and not product.layout.endswith(ROUNDED)
    if isinstance(config, VectorConfig):
        return bucket <= (1 if product.layout else 2)
    if isinstance(config, LibraryConfig):
        return bucket > FEWEST_OF_PARTS and not product.layout and _is_legal_in_parts(product, config)
    if isinstance(config, FewConfig):
        reads = product.layout.startswith("int4") and "lows" not in product.layout
        return reads and bucket <= MOST_TOKENS and config.fits(product.inputs)
    if not (_is_legal_of_codes(product.layout, config) if product.layout else _is_legal_of_dense(config)):
        return False
    cut = (*SPLIT_FORMS, "plain") if isinstance(config, WideningConfig) else SPLIT_FORMS
    if not config.fits(product.inputs) or (config.splits > 1 and product.form not in cut):
        return False
    if isinstance(config, TileConfig):
        return True
    return product.form != "residual" and bucket >= (32 if isinstance(config, WideningConfig) else 65)


def _is_legal_in_parts(product: Product, config: LibraryConfig) -> bool:
    if product.form == "gated":
        return config.splits == 1 and 0 < config.first < product.rows and config.first % (2 * ALIGNED) == 0
    return product.form == "partial" and config.splits > 1 and not config.first and config.fits(product.inputs)


def _is_legal_of_dense(config: Config) -> bool:
    return not isinstance(config, WideningConfig) and not (isinstance(config, TileConfig) and config.rounded)


def _is_legal_of_codes(layout: str, config: Config) -> bool:
    """Of quantized weights in tiles only those that are multiplied as they are may come through TMA."""
    if isinstance(config, WideningConfig):
        return layout.startswith("int4") and "lows" not in layout
    if not isinstance(config, TileConfig):
        return False
    return layout.endswith(ROUNDED) if config.rounded else not config.tma


def bucket_of(num_tokens: int) -> int:
    """The smallest bucket that holds ``num_tokens``."""
    buckets = BUCKETS if num_tokens <= BUCKETS[-1] else WIDE_BUCKETS
    return buckets[bisect_left(buckets, num_tokens)]


def tokens_class(num_tokens: int) -> int:
    """A token count that stands for all counts with the same choices."""
    if num_tokens < MANY:
        return bucket_of(num_tokens) if num_tokens > 0 else num_tokens
    return max(least for least in (MANY, *PROMPT_BUCKETS) if least <= num_tokens)


def pack(config: Config | None) -> dict[str, Any]:
    """``{"kernel": "gemv", "rows": 8, ...}``; None, the library, is ``{"kernel": "cublas"}``."""
    if config is None:
        return {"kernel": str(LinearKernel.CUBLAS)}
    return {"kernel": str(kernel_of(config)), **asdict(config)}


def parse(stored: dict[str, Any]) -> Config | None:
    """What `pack` gave.

    Raises:
        ValueError, TypeError: it gave something else.
    """
    fields = dict(stored)
    kernel = LinearKernel(fields.pop("kernel", ""))
    return None if kernel is LinearKernel.CUBLAS else CONFIGS[kernel](**fields)
