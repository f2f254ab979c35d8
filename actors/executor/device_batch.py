"""The persistent batch, device side: tokens, block tables and sampling columns of every slot, and their changes."""

from __future__ import annotations

import torch

from actors.executor.batch import NUM_COLUMNS, BatchLimits


class DeviceBatch:
    """Tensors of S = ``max_num_seqs`` + 1 slots; the last is the dummy slot, whose tokens are never read.

    ``tokens`` [S, L] int32; ``block_tables`` [S, MB] int32 (unused entries name block 0 or an old block: valid, never
    read); ``columns`` [8, S] int32 (float32 bits in the first six rows, see :mod:`actors.executor.batch`); ``seeds``
    [S] int64; ``rule_ids``, ``rule_values``, ``rule_until`` [S, K], K growing as needed.
    """

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size = limits.max_num_seqs + 1
        self._device = device
        self.tokens = torch.zeros((size, limits.max_model_len), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((size, limits.table_width), dtype=torch.int32, device=device)
        self.columns = torch.zeros((NUM_COLUMNS, size), dtype=torch.int32, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self._make_rules(size, 0)
        self._flat_tokens = self.tokens.view(-1)
        self._flat_tables = self.block_tables.view(-1)

    def _make_rules(self, size: int, width: int) -> None:
        self.rule_ids = torch.full((size, width), -1, dtype=torch.int32, device=self._device)
        self.rule_values = torch.zeros((size, width), dtype=torch.float32, device=self._device)
        self.rule_until = torch.zeros((size, width), dtype=torch.int32, device=self._device)

    def apply(self, deltas: dict[str, torch.Tensor]) -> None:
        """Scatter the deltas of one step; those about blocks' contents and rows of the pass are for others."""
        if "new_slots" in deltas:
            slots = deltas["new_slots"].long()
            self.columns[:, slots] = deltas["columns"].view(NUM_COLUMNS, -1)
            self.seeds[slots] = deltas["seeds"].view(torch.int64)
            self._flat_tokens[deltas["token_index"].long()] = deltas["token_values"]
        if "rule_slots" in deltas:
            self._set_rules(deltas)
        if "table_index" in deltas:
            self._flat_tables[deltas["table_index"].long()] = deltas["table_values"]

    def _set_rules(self, deltas: dict[str, torch.Tensor]) -> None:
        slots = deltas["rule_slots"].long()
        width = len(deltas["rule_ids"]) // len(slots)
        if width > self.rule_ids.shape[1]:
            old = (self.rule_ids, self.rule_values, self.rule_until)
            self._make_rules(len(self.seeds), width)
            for new, kept in zip((self.rule_ids, self.rule_values, self.rule_until), old, strict=True):
                new[:, : kept.shape[1]] = kept
        self.rule_ids[slots] = deltas["rule_ids"].view(-1, width)
        self.rule_values[slots] = deltas["rule_values"].view(torch.float32).view(-1, width)
        self.rule_until[slots] = deltas["rule_until"].view(-1, width)
