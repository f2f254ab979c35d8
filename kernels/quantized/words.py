"""Four-bit codes in words, in the order in which kernels read them.

Columns are cut into tiles of 128. Word j of a tile's 16 holds the codes of columns j, j + 16, ... j + 112, the first in
the lowest bits: a word's eight codes belong to eight steps of 16 columns, which is as wide as a matrix instruction is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE, WORDS = 128, 16
CODES = TILE // WORDS


def num_words(columns: int) -> int:
    """Words of a row; the last tile is padded with zeros."""
    return -(-columns // TILE) * WORDS


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., K] whole numbers 0 to 15 -> int32 [..., num_words(K)]."""
    padded = F.pad(codes, (0, -codes.shape[-1] % TILE)).to(torch.int32)
    tiles = padded.unflatten(-1, (-1, CODES, WORDS))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device).unsqueeze(1)
    words: torch.Tensor = (tiles << shifts).sum(-2, dtype=torch.int32).flatten(-2)
    return words


def unpack_words(words: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [..., num_words(K)] -> uint8 [..., K] of K = ``columns``."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).unsqueeze(1)
    codes: torch.Tensor = (words.unflatten(-1, (-1, 1, WORDS)) >> shifts) & 15
    return codes.to(torch.uint8).flatten(-3)[..., :columns]
