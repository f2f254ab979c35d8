"""The inputs of a pass: token ids, positions, and where keys and values go."""

from __future__ import annotations

import torch

from pagebus.actors.executor.batch.layout import BatchLimits, aligned
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.models import Tokens


class PassInputs:
    """The inputs of all passes of a model. They keep their addresses, because captured graphs read them there.

    ``input_ids``, ``positions`` [T] int32; ``slot_mappings`` [N, T] int64, one for each table of blocks;
    ``context_lens`` [R] int32.
    """

    def __init__(self, ops: Ops, limits: BatchLimits, device: torch.device, *, num_tables: int) -> None:
        self._prepare, self._block_size = ops.prepare_inputs, limits.block_size
        size, rows = aligned(limits.most_tokens), max(limits.padded_samples, limits.verified_tokens)
        self.input_ids, self.positions = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.slot_mappings = torch.zeros(num_tables, size, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.int32, device=device)

    def tokens(self, count: int, kv_cache: torch.Tensor) -> Tokens:
        """The first ``count`` tokens of a pass over this cache."""
        slots, *windowed = self.slot_mappings[:, :count].unbind()
        return Tokens(
            self.input_ids[:count], self.positions[:count], slots, kv_cache, padding=slots,
            windowed_mappings=tuple(windowed),
        )  # fmt: skip

    def prepare(
        self, num_tokens: int, token_table: torch.Tensor, block_tables: torch.Tensor, slots: torch.Tensor,
        starts: torch.Tensor, query_start: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill in ``num_tokens`` tokens, those of ``slots`` [R] from ``starts`` [R] on; ``query_start`` [R + 1]."""
        self._prepare(
            token_table,
            block_tables,
            slots,
            starts,
            query_start,
            self._block_size,
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mappings[:, :num_tokens],
            context_lens=self.context_lens[: len(slots)],
        )
