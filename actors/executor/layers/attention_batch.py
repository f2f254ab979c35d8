"""The tokens of a forward pass as attention sees them: which sequence each belongs to, and where its keys are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.attention.choice import StepRows
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import Spans


@dataclass(frozen=True, slots=True)
class Tokens:
    """What T tokens of a pass are, and where their keys and values go: ``ids``, ``positions`` and ``slot_mapping`` [T]
    (negative: nowhere; None: attention itself will store them). ``padding`` [T] is negative where a pass of fixed shape
    has no token; None: it has everywhere."""

    ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor | None
    kv_cache: torch.Tensor
    padding: torch.Tensor | None = None
    windowed_mappings: tuple[torch.Tensor, ...] = ()
    """As ``slot_mapping``, in the pages of layers with windows where these have their own."""

    def mapping_of(self, page: int) -> torch.Tensor | None:
        """Where keys go of layers in this one of a block's pages."""
        return self.windowed_mappings[page - 1] if page and self.slot_mapping is not None else self.slot_mapping


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The N tokens of a pass whose hidden states are wanted, each the newest of its sequence: ``index`` [N] among those
    of the pass, their ``slots`` and ``context_lens`` [N], themselves included. All int32."""

    index: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens of a pass belong to which sequences. R rows, T tokens, S slots.

    ``slots`` [R], ``query_start`` [R + 1], ``context_lens`` [R] (with this pass's tokens) and ``block_tables`` [S, MB]
    are int32, ``slot_mapping`` [T] int64 (block * block_size + offset, -1: not stored). The first ``num_decodes`` rows
    have one token each. ``spans`` is how the others are cut, if there are any. A pass of fixed shape also has
    ``decode_lens`` [R] int32 (see :func:`pagebus.kernels.attention.paged_attention.paged_attention`).
    """

    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int
    long_rows: tuple[LongRow, ...] = ()
    """Parts of the rows after the decodes that are left to a library, or to our kernel for long prompts
    (`LongRow.for_hopper`), as the host knows them; ``spans`` has none of their queries."""
    decode_lens: torch.Tensor | None = None
    spans: Spans | None = None
    longest: int = 0
    """No row has more tokens; for networks without a cache."""
    runs: bool = False
    """Whether no row has more tokens than one with drafts may have, as the host knows."""
    last: LastTokens | None = None
    """What the last layer goes on with behind its keys and values; None: all tokens."""
    windowed_tables: tuple[torch.Tensor, ...] = ()
    windowed_mappings: tuple[torch.Tensor, ...] = ()
    """As ``block_tables`` and ``slot_mapping``, of the pages of layers with windows where these have their own."""

    def table_of(self, page: int) -> torch.Tensor:
        """The block table of layers in this one of a block's pages."""
        return self.windowed_tables[page - 1] if page else self.block_tables

    @property
    def rows(self) -> StepRows:
        """What the attention path is chosen by."""
        prompts = len(self.slots) > self.num_decodes or self.decode_lens is not None
        whole = self.last is None and self.num_decodes == len(self.slot_mapping)
        return StepRows(self.num_decodes, prompts, bool(self.long_rows), whole, self.runs)

    def of_last_tokens(self, last: LastTokens) -> AttentionBatch:
        """The same pass in which only these tokens attend, as decodes: all before them is in the cache."""
        count = len(last.index)
        return AttentionBatch(
            slots=last.slots,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=last.slots.device),
            context_lens=last.context_lens,
            slot_mapping=self.slot_mapping[:0],  # all are stored
            block_tables=self.block_tables,
            num_decodes=count,
            windowed_tables=self.windowed_tables,
        )
