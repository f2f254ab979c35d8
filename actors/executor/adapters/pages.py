"""Pages of blocks of the cache: stretches for other things than keys and values, of the model's number format."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagebus.actors.settings import SettingsError
from pagebus.kernels.lora.pages import COLUMNS


class BlockPages(NamedTuple):
    """Blocks of ``block_bytes``, of which each holds a page of ``size`` elements of ``dtype``. Pages begin at multiples
    of :data:`COLUMNS` elements of the cache. Where blocks do not, a page is up to so many elements shorter."""

    block_bytes: int
    dtype: torch.dtype

    @property
    def _unit(self) -> int:
        return int(COLUMNS) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Raises SettingsError: blocks are too small for any."""
        lost = self._unit - math.gcd(self.block_bytes, self._unit)
        size = (self.block_bytes - lost) // self._unit * int(COLUMNS)
        if size <= 0:
            raise SettingsError(
                f"--enable-lora: blocks of the cache have {self.block_bytes} bytes, and adapters need "
                f"{self._unit + lost}: raise --block-size"
            )
        return size

    def begins(self, blocks: torch.Tensor) -> torch.Tensor:
        """The elements of the cache with which the pages of ``blocks`` [n] int64 begin."""
        return -(-blocks * self.block_bytes // self._unit) * int(COLUMNS)

    def count(self, num_elements: int) -> int:
        """Pages for so many elements."""
        return -(-num_elements // self.size)

    def within(self, blocks: torch.Tensor) -> torch.Tensor:
        """The bytes of a cache [num_blocks, ...] as elements."""
        raw = blocks.view(-1).view(torch.uint8)
        return raw[: len(raw) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
