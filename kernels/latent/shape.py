"""Launch shapes of attention over latents."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.kernels.attention.forms.form import USUAL, DecodeForm
from pagebus.kernels.attention.forms.launch import DecodeConfig
from pagebus.kernels.attention.paged_attention import AttentionShape
from pagebus.kernels.attention.prefill_plan import PrefillConfig
from pagebus.kernels.common.target import Target

MOST_HEADS, LEAST_HEADS = 32, 16
"""Of a program: columns of its products. Of 32, results of 512 numbers fill the registers of eight warps."""
TILE, STAGES = 32, 3
"""Tokens: a tile of 32 latents and shared keys takes 36 kB of shared memory, and there are two."""


@dataclass(frozen=True, slots=True)
class LatentShape(AttentionShape):
    """``head_dim`` is the size K of latents, which is that of a head's result. A key is ``rope_dim`` numbers longer."""

    rope_dim: int = 0

    @property
    def heads(self) -> int:
        """Query heads of a program."""
        return LEAST_HEADS if self.q_heads <= LEAST_HEADS or self.element_size > 2 else MOST_HEADS

    @property
    def programs_per_query(self) -> int:
        """Programs among which the heads of decodes are divided."""
        return -(-self.q_heads // self.heads)

    @property
    def packs_few(self) -> bool:
        """All of its prompts are packed."""
        return False

    def form(self, num_rows: int, target: Target | None) -> DecodeForm:
        """One for all."""
        return USUAL

    def decodes(self, processors: int, queries: int = 1, form: DecodeForm = USUAL) -> DecodeConfig:
        """Of 16 heads two programs share a multiprocessor, of 32 it has one. Rows have one query."""
        if self.element_size > 2:
            programs = 2 * processors // self.programs_per_query
            return DecodeConfig(tile=16, programs=max(1, programs), num_warps=8, num_stages=1)
        held = MOST_HEADS // self.heads
        programs = max(1, held * processors // self.programs_per_query)
        return DecodeConfig(tile=TILE, programs=programs, num_warps=8 // held, num_stages=STAGES)

    def prompts(self, longest: int, context: int) -> PrefillConfig:
        """A tile's columns are all heads of a program for one query, then for the next."""
        if self.element_size > 2:
            return PrefillConfig(block_queries=1, tile=16, num_warps=8, num_stages=1, heads=self.heads)
        queries = MOST_HEADS // self.heads
        return PrefillConfig(block_queries=queries, tile=TILE, num_warps=8, num_stages=STAGES, heads=self.heads)

    def alone(self) -> PrefillConfig:
        """The same: a column depends on no other."""
        return self.prompts(0, 0)
