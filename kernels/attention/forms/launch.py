"""Launch shapes of decode attention: a form, and how many programs a GPU holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.kernels.attention.forms.form import USUAL, DecodeForm
from pagebus.kernels.common.triton import next_power_of_2


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch shape of the decode kernel. tile: tokens per step; programs: per KV head; apart: as of `DecodeForm`."""

    tile: int
    programs: int
    num_warps: int
    num_stages: int
    apart: bool = False


def programs_held(head_dim: int, group: int) -> int:
    """How many programs of 4 warps a multiprocessor holds at once. Tiles of 16 and more columns are multiplied by
    instructions of a warpgroup, which take queries and weights from shared memory as well."""
    if next_power_of_2(head_dim) > 128:
        return 2
    return 4 if group <= 8 else 3 if group <= 16 else 2


def most_registers(head_dim: int, group: int) -> int | None:
    """How many registers a thread of such a program may use, if the compiler has to be told."""
    return None if next_power_of_2(head_dim) > 128 else 65536 // (128 * programs_held(head_dim, group)) // 8 * 8


def decode_config(
    kv_heads: int, head_dim: int, element_size: int, processors: int, *, float8: bool = False, group: int = 1,
    queries: int = 1, small_memory: bool = False, form: DecodeForm = USUAL,
) -> DecodeConfig:  # fmt: skip
    """The launch shape; element_size in bytes, of queries; group: query heads per KV head; queries: the most of a run;
    small_memory: the GPU's (`Target.small_memory`); form: of single queries in 16 bits. As many programs as the device
    holds at once."""
    if element_size > 2:
        return DecodeConfig(tile=16, programs=max(1, 2 * processors // kv_heads), num_warps=8, num_stages=1)
    if queries > 1 and group * queries > 32 and head_dim > 64:  # one program then fills the registers
        return DecodeConfig(tile=64, programs=max(1, processors // kv_heads), num_warps=8, num_stages=2)
    group *= queries
    held = programs_held(head_dim, group)
    programs = (held // 2 if small_memory and head_dim > 64 else held) * processors // kv_heads
    return DecodeConfig(form.tile, max(1, programs), num_warps=4, num_stages=3 if float8 else 2, apart=form.apart)
