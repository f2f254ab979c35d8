"""How tiles of numbers of 8 bits and of tokens are read."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton


@triton.jit
def load_tiles(
    inputs,  # pointers [BLOCK_M, BLOCK_K] to the first inputs of each token
    numbers,  # pointers [BLOCK_N, BLOCK_K] to the first numbers of each row
    there,  # [BLOCK_M, 1]: which tokens there are
    exists,  # [BLOCK_N, 1]: which rows are needed
    column,  # [BLOCK_K], from 0
    k,  # the tile's first column
    part,  # how many columns there are
    EVEN_K: tl.constexpr,  # part is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows exist
):
    """Inputs and numbers of a tile, 0 where there are none."""
    if EVEN_K:
        x = tl.load(inputs + k, mask=there, other=0.0)
        w = tl.load(numbers + k) if EVEN_N else tl.load(numbers + k, mask=exists, other=0.0)
    else:
        inside = (column + k < part)[None, :]
        x = tl.load(inputs + k, mask=there & inside, other=0.0)
        w = tl.load(numbers + k, mask=exists & inside, other=0.0)
    return x, w
