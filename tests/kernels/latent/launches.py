"""What launches the kernels over latents, on tensors without memory: for compiling them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import Spans, plan_attention
from pagebus.kernels.latent.attention import latent_attention
from pagebus.kernels.latent.expanded import expanded_attention
from pagebus.kernels.latent.head_product import head_product
from pagebus.kernels.latent.shape import LatentShape
from pagebus.kernels.latent.write import latent_write

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def latents() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and launches."""
    for heads, dtype in ((16, BF16), (20, BF16), (128, BF16), (16, FP32)):
        yield f"latents {heads} heads {'fp32' if dtype == FP32 else 'bf16'}", partial(attend, heads, dtype)
    yield "expanded 16 heads bf16", partial(expand, 16, 128, 128, 4096)
    yield "expanded 20 heads of 192 and 256 bf16", partial(expand, 20, 192, 256, 4096)
    yield "expanded 128 heads in pieces bf16", partial(expand, 128, 128, 128, 65536)
    yield "latent parts", parts


def attend(heads: int, dtype: torch.dtype) -> None:
    """Decodes and prompts of a pass."""
    shape = LatentShape(heads, 1, 512, dtype.itemsize, rope_dim=64)
    plan = plan_attention(meta(8), meta(8), shape, Spans(shape.prompts(0, 0), meta(64, 5), meta(4, 4)))
    latent_attention(
        meta(64, heads, 512, dtype=dtype), meta(64, heads, 192, dtype=dtype)[..., 128:],
        meta(1024, 2, 1, 16, 576, dtype=dtype)[:, 1, 0], slots=meta(10), query_start=meta(11), context_lens=meta(10),
        block_tables=meta(64, 512), scale=0.1, num_decodes=8, plan=plan,
    )  # fmt: skip


def expand(heads: int, nope: int, value: int, context: int) -> None:
    """A prompt of 4096 tokens, of a context of so many."""
    expanded_attention(
        meta(4096, heads, nope + 64, dtype=BF16), meta(1024, 2, 1, 16, 576, dtype=BF16)[:, 1, 0],
        meta(heads, nope + value, 512, dtype=BF16), meta(4096, heads, value, dtype=BF16), slots=meta(1),
        block_tables=meta(64, 4096), scale=0.1, rows=[LongRow(0, 0, 4096, context)],
    )  # fmt: skip


def parts() -> None:
    """What goes into the cache, and products of few tokens and of many, with either part of the expansion."""
    expansion = meta(16, 256, 512, dtype=BF16)
    for tokens in (1, 4096):
        head_product(meta(tokens, 16, 192, dtype=BF16)[..., :128], expansion[:, :128])
        head_product(meta(tokens, 16, 512, dtype=BF16), expansion[:, 128:].transpose(1, 2))
    product = meta(64, 3648, dtype=BF16)
    latent_write(
        product[:, :3072].view(64, 16, 192), product[:, 3072:], meta(64), meta(4096, 64, dtype=FP32),
        meta(1024, 2, 1, 16, 576, dtype=BF16)[:, 1, 0], meta(64, dtype=torch.int64), norm=meta(512, dtype=BF16),
        eps=1e-6,
    )  # fmt: skip
