"""Blocks of GGUF files. A block holds numbers of one row that share a scale, and perhaps a minimum, among its bytes;
K-quants have blocks of 256, whose groups of 16 or 32 have small scales of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from pagebus.actors.executor.loading.formats.reading import Codes, Expected, Reader, Tensors
from pagebus.actors.model.gguf.types import TYPES
from pagebus.actors.model.quantization.scheme import Scheme

FORMATS = frozenset(each.name for each in TYPES.values() if each.scheme is not None)
Blocks = torch.Tensor
"""uint8 [N, blocks of a row, bytes of a block]."""


def _float(blocks: Blocks, place: int) -> torch.Tensor:
    """The float16 from byte ``place`` on, as float32 [N, blocks]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _halves(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] -> [..., 2 B]: all low halves of bytes, then all high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """[N, blocks, numbers] -> int8 [N, K]."""
    return (codes.flatten(1).to(torch.int8)) - middle


def _centred(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> Codes:
    """Codes q of 4 bits that mean q * scale - low; those of the layout mean (q - 8) * scale - low."""
    return Codes(codes.flatten(1), scale, low=low - 8 * scale)


def _q4_0(blocks: Blocks) -> Codes:
    return Codes(_halves(blocks[..., 2:]).flatten(1), _float(blocks, 0))


def _q4_1(blocks: Blocks) -> Codes:
    return _centred(_halves(blocks[..., 4:]), _float(blocks, 0), -_float(blocks, 2))


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> [..., 32], each 0 or 16: a bit of the input, from the lowest of the first byte on."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _q5_0(blocks: Blocks) -> Codes:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(_signed(codes, 16), _float(blocks, 0))


def _q5_1(blocks: Blocks) -> Codes:
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Codes(_signed(codes, 0), _float(blocks, 0), low=-_float(blocks, 2))


def _q8_0(blocks: Blocks) -> Codes:
    return Codes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _float(blocks, 0))


def _small_scales(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of K-quants, [N, 8 per block] each. They have 6 bits; the two highest bits of the last four lie
    above the first four."""
    first, second, third = (blocks[..., place : place + 4] for place in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    large, least = _float(blocks, 0).unsqueeze(-1), _float(blocks, 2).unsqueeze(-1)
    return (large * scales).flatten(1), (least * minima).flatten(1)


def _runs(data: torch.Tensor) -> torch.Tensor:
    """Half bytes uint8 [N, blocks, 128] -> [N, blocks, 256]: each 32 bytes give 32 low halves, then 32 high ones."""
    return _halves(data.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(blocks: Blocks) -> Codes:
    return _centred(_runs(blocks[..., 16:]), *_small_scales(blocks))


def _q5_k(blocks: Blocks) -> Codes:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    fifth = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    scale, low = _small_scales(blocks)
    return Codes(_signed(_runs(blocks[..., 48:]) | fifth.flatten(-2), 0), scale, low=low)


def _q6_k(blocks: Blocks) -> Codes:
    """Each half of 128 has 64 bytes of low halves, and 32 bytes of four pairs of high bits."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64)))
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    scale = blocks[..., 192:208].contiguous().view(torch.int8)
    return Codes(_signed(low | (high.flatten(-2) << 4), 32), (_float(blocks, 208).unsqueeze(-1) * scale).flatten(1))


def _expected(name: str, scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return {"weight": Expected((name,), ((rows, columns),))}


def _read(
    unpack: Callable[[Blocks], Codes], size: int, tensors: Tensors, scheme: Scheme, rows: int, columns: int
) -> Codes:
    return unpack(tensors["weight"].view(rows, -1, size))


UNPACK: Mapping[str, Callable[[Blocks], Codes]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip


def _none(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    raise AssertionError("no tensor is stored as several types")


READERS = {
    each.scheme.packing: Reader(partial(_expected, each.name), partial(_read, UNPACK[each.name], each.size))
    for each in TYPES.values()
    if each.scheme is not None
} | {"mixed": Reader(partial(_expected, "mixed"), _none)}
"""Readers by the packing of a scheme. ``mixed`` is the scheme of a fused product: no file has a tensor of it, but its
name is looked up."""
