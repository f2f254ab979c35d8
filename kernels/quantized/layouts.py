"""The three layouts of quantized weights: rows of 8 bits, blocks of 8 bits, words of 4.

A weight is [N, K], or [E, N, K] for the experts of a layer; kernels know only these layouts, whatever format the
checkpoint has. Each has a ``part`` for the loader, and ``dense``, the torch reference that says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import torch

from pagebus.kernels.quantized.values import exponents
from pagebus.kernels.quantized.words import unpack_words

Tensor = torch.Tensor
L = TypeVar("L", "W8Rows", "W8Blocks", "W4Words")


@dataclass(frozen=True, slots=True, eq=False)
class W8Rows:
    """w = ``values`` [..., N, K] int8 or float8_e4m3fn times ``scale`` [..., N] float32.

    ``rounded``: activations of several tokens may be rounded to the same format, as the checkpoint was made for that.
    """

    values: Tensor
    scale: Tensor
    rounded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]"""
        return tuple(self.values.shape)

    def part(self, expert: int | None, start: int, stop: int) -> W8Rows:
        """Rows ``start`` to ``stop`` of an expert, sharing memory."""
        return _each(self, lambda tensor, _: _of(tensor, expert)[start:stop])

    def reorder(self, rows: Tensor) -> None:
        """Put these ``rows`` [N] in place of the own."""
        _reorder((self.values, self.scale), 0, rows)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K], computed in float32 and rounded once."""
        return (self.values.float() * self.scale.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class W8Blocks:
    """w = (``values`` - ``zero``) * ``scale`` - ``low``, with int8 or float8_e4m3fn values [..., N, K].

    The others are float32 [..., ceil(N / rows), ceil(K / columns)], where ``block`` is (rows, columns); ``zero`` and
    ``low`` may be absent. Column j of the values is column ``order`` [K] int32 [j] of the weight. ``rounded``: as of
    `W8Rows`, with a scale for each token and group of as many columns.
    """

    values: Tensor
    scale: Tensor
    block: tuple[int, int]
    zero: Tensor | None = None
    low: Tensor | None = None
    order: Tensor | None = None
    rounded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]"""
        return tuple(self.values.shape)

    def part(self, expert: int | None, start: int, stop: int) -> W8Blocks:
        """Rows ``start`` to ``stop`` of an expert, sharing memory; ``start`` is a multiple of the block's rows."""
        height = self.block[0]
        assert start % height == 0

        def cut(tensor: Tensor, name: str) -> Tensor:
            if name == "order":
                return _of(tensor, expert)
            rows = slice(start, stop) if name == "values" else slice(start // height, -(-stop // height))
            return _of(tensor, expert)[rows]

        return _each(self, cut)

    def reorder(self, rows: Tensor) -> None:
        """Put these ``rows`` [N] in place of the own; only of blocks of one row."""
        assert self.block[0] == 1
        _reorder((self.values, self.scale, self.zero, self.low), 0, rows)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K], computed in float32 and rounded once."""
        values = self.values.float()
        if self.zero is not None:
            values = values - self._spread(self.zero)
        values = values * self._spread(self.scale)
        if self.low is not None:
            values = values - self._spread(self.low)
        return in_columns(values, self.order).to(dtype)

    def _spread(self, tensor: Tensor) -> Tensor:
        rows, columns = self.shape[-2:]
        spread = tensor.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return spread.repeat_interleave(self.block[1], -1)[..., :columns]


@dataclass(frozen=True, slots=True, eq=False)
class W4Words:
    """w = (code - ``zero``) * ``scale`` - ``low``, with codes in ``words`` int32 [..., N, num_words(K)].

    ``scale`` [..., ceil(K / group), N] is float32, or uint8 exponents of two (E8M0), or float8_e4m3fn beside ``whole``
    [..., N] float32, which multiplies too. Without a ``table`` codes are numbers 0 to 15 whose zero is ``zero`` (uint8,
    as scale), or 8; with one [16] float32 they are its entries (``e2m1``: those of :data:`E2M1`), and there are no
    zeros. ``low`` (float32, as scale) and ``order`` as in :class:`W8Blocks`.
    """

    words: Tensor
    scale: Tensor
    columns: int
    group: int
    zero: Tensor | None = None
    low: Tensor | None = None
    whole: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    e2m1: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]"""
        return (*self.words.shape[:-1], self.columns)

    def part(self, expert: int | None, start: int, stop: int) -> W4Words:
        """Rows ``start`` to ``stop`` of an expert, sharing memory."""

        def cut(tensor: Tensor, name: str) -> Tensor:
            if name == "table":
                return tensor
            own = _of(tensor, expert)
            if name == "order":
                return own
            return own[start:stop] if name in ("words", "whole") else own[:, start:stop]

        return _each(self, cut)

    def reorder(self, rows: Tensor) -> None:
        """Put these ``rows`` [N] in place of the own."""
        _reorder((self.words, self.whole), 0, rows)
        _reorder((self.scale, self.zero, self.low), 1, rows)

    def scales(self) -> Tensor:
        """float32 [..., ceil(K / group), N]."""
        scale = exponents(self.scale) if self.scale.dtype == torch.uint8 else self.scale.float()
        return scale if self.whole is None else scale * self.whole.unsqueeze(-2)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., N, K], computed in float32 and rounded once."""
        codes = unpack_words(self.words, self.columns)
        if self.table is not None:
            values = self.table[codes.long()]
        else:
            values = codes.float() - (8.0 if self.zero is None else self._spread(self.zero.float()))
        values = values * self._spread(self.scales())
        if self.low is not None:
            values = values - self._spread(self.low)
        return in_columns(values, self.order).to(dtype)

    def _spread(self, tensor: Tensor) -> Tensor:
        """[..., G, N] -> [..., N, K]."""
        return tensor.transpose(-1, -2).repeat_interleave(self.group, -1)[..., : self.columns]


Layout: TypeAlias = W8Rows | W8Blocks | W4Words
Weight: TypeAlias = torch.Tensor | W8Rows | W8Blocks | W4Words
"""Of a product: dense, or quantized."""


def tensors_of(layout: Layout) -> list[Tensor]:
    """All that it holds."""
    return [value for value in _fields(layout).values() if isinstance(value, torch.Tensor)]


def num_bytes(layout: Layout) -> int:
    """Memory that it takes."""
    return sum(tensor.nbytes for tensor in tensors_of(layout))


def in_columns(values: Tensor, order: Tensor | None) -> Tensor:
    """values [..., N, K] whose column j is column ``order`` [..., K] [j] of the result."""
    if order is None:
        return values
    places = order.long().unsqueeze(-2).expand(values.shape)
    return torch.empty_like(values).scatter_(-1, places, values)


def _fields(layout: Layout) -> dict[str, Any]:
    return {field.name: getattr(layout, field.name) for field in fields(layout)}


def _each(layout: L, change: Callable[[Tensor, str], Tensor]) -> L:
    """With every tensor changed."""
    found = {name: value for name, value in _fields(layout).items() if isinstance(value, torch.Tensor)}
    changed: dict[str, Any] = {name: change(tensor, name) for name, tensor in found.items()}
    return replace(layout, **changed)


def _reorder(tensors: Iterable[Tensor | None], dim: int, rows: Tensor) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(_bytes(tensor).index_select(dim, rows).view(tensor.dtype))


def _bytes(tensor: Tensor) -> Tensor:
    """Of numbers of one byte: what can be indexed on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _of(tensor: Tensor, expert: int | None) -> Tensor:
    return tensor if expert is None else tensor[expert]
