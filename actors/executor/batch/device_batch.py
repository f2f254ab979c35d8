"""The persistent batch, device side: tokens, block tables and sampling columns of every slot, and their changes."""

from __future__ import annotations

import torch

from pagebus.actors.executor.batch.layout import NUM_COLUMNS, BatchLimits
from pagebus.actors.executor.batch.step_masks import StepMasks
from pagebus.actors.executor.device.ops import Ops


class DeviceBatch:
    """Tensors of S = ``max_num_seqs`` + 1 slots; the last is the dummy slot, whose tokens are never read.

    ``tokens`` [S, L] int32; ``block_tables`` [S, MB] int32 (unused entries name block 0 or an old block: valid, never
    read); ``all_tables`` [1 + W, S, MB], that one and those of the W pages that a block has for layers with windows,
    ``windowed_tables``; ``columns`` [8, S] int32 (float32 bits in the first six rows, see
    :mod:`pagebus.actors.executor.batch.layout`); ``seeds`` [S] int64; ``rule_ids``, ``rule_values``, ``rule_until`` [S,
    K], K growing as needed; ``masks`` [S, ceil(V / 32)] int32, bits of the tokens allowed (empty until needed);
    ``word_tokens``, ``word_lens`` [S, F] int32, F growing. The first four are parts of one array
    (:class:`~pagebus.actors.executor.batch.layout.SlotLayout`). ``num_growths`` counts how often a table was exchanged
    for a larger one. ``step_masks`` are those of one step alone.
    """

    def __init__(self, ops: Ops, limits: BatchLimits, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        layout, size = limits.layout, limits.layout.num_slots
        self._words = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.seeds = self._words[: 2 * size].view(torch.int64)
        self.columns = self._words[layout.columns :][: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        tables = self._words[layout.block_tables : layout.tokens].view(layout.num_tables, layout.table_words)
        self.all_tables = tables[:, : size * layout.table_width].unflatten(1, (size, layout.table_width))
        self.block_tables, *windowed = self.all_tables.unbind()
        self.windowed_tables = tuple(windowed)
        self.tokens = self._words[layout.tokens :].view(size, -1)
        self.num_growths = 0
        self.step_masks = StepMasks(limits.most_samples, limits.vocab_size, device)
        self._make_rules(size, 0)
        self.masks = torch.empty((size, 0), dtype=torch.int32, device=device)
        self.word_tokens = torch.zeros((size, 0), dtype=torch.int32, device=device)
        self.word_lens = torch.zeros((size, 0), dtype=torch.int32, device=device)

    def _make_rules(self, size: int, width: int) -> None:
        self.rule_ids = torch.full((size, width), -1, dtype=torch.int32, device=self._device)
        self.rule_values = torch.zeros((size, width), dtype=torch.float32, device=self._device)
        self.rule_until = torch.zeros((size, width), dtype=torch.int32, device=self._device)

    def apply(self, deltas: dict[str, torch.Tensor]) -> None:
        """Scatter the deltas of one step; those about blocks' contents and rows of the pass are for others."""
        if "places" in deltas:
            self._ops.scatter_words(self._words, deltas["places"], deltas["values"])
        if "chosen_places" in deltas:  # after tokens that may be new in the same step
            self._ops.scatter_words(self._words, deltas["chosen_places"], deltas["chosen_values"])
        if "rule_slots" in deltas:
            self._set_rules(deltas)
        if "mask_slots" in deltas:
            self._set_masks(deltas)
        if "word_slots" in deltas:
            self._set_words(deltas)

    def store_sampled(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store ``tokens`` [N] int32, which another rank has sampled, at ``positions`` of ``slots``, [N] int32 each."""
        self._ops.store_sampled(self.tokens, slots, positions, tokens)

    def _set_rules(self, deltas: dict[str, torch.Tensor]) -> None:
        slots = deltas["rule_slots"].long()
        width = len(deltas["rule_ids"]) // len(slots)
        if width > self.rule_ids.shape[1]:
            old = (self.rule_ids, self.rule_values, self.rule_until)
            self.num_growths += 1
            self._make_rules(len(self.seeds), width)
            for new, kept in zip((self.rule_ids, self.rule_values, self.rule_until), old, strict=True):
                new[:, : kept.shape[1]] = kept
        self.rule_ids[slots] = deltas["rule_ids"].view(-1, width)
        self.rule_values[slots] = deltas["rule_values"].view(torch.float32).view(-1, width)
        self.rule_until[slots] = deltas["rule_until"].view(-1, width)

    def _set_masks(self, deltas: dict[str, torch.Tensor]) -> None:
        rows = deltas["mask_words"].view(len(deltas["mask_slots"]), -1)
        if not self.masks.shape[1]:
            self.num_growths += 1
            self.masks = torch.full((len(self.seeds), rows.shape[1]), -1, dtype=torch.int32, device=self._device)
        self.masks[deltas["mask_slots"].long()] = rows

    def _set_words(self, deltas: dict[str, torch.Tensor]) -> None:
        slots = deltas["word_slots"].long()
        width = len(deltas["word_tokens"]) // len(slots)
        if width > self.word_tokens.shape[1]:
            self.num_growths += 1
            missing = width - self.word_tokens.shape[1]
            self.word_tokens = torch.nn.functional.pad(self.word_tokens, (0, missing))
            self.word_lens = torch.nn.functional.pad(self.word_lens, (0, missing))
        self.word_tokens[slots] = deltas["word_tokens"].view(-1, width)
        self.word_lens[slots] = deltas["word_lens"].view(-1, width)
