"""A model for tests: the next token follows from a hash of all tokens before it, in whole numbers.

So its tokens are the same in every batch, after every preemption and on every executor, and hundreds of streams can be
compared to the byte. It goes the whole way that other models go: each token is written to the cache, and the hash is
made of what the cache holds, so that a block lost, mixed up or given away too early changes the text. It has no
weights (``--load-format dummy``). A pass takes a millisecond for each layer, to be as slow as a test wants it.

In a ``config.json``: ``"architectures": ["OracleForCausalLM"]``, one head of dimension 2 and ``hidden_size`` 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.models.decoder import Decoder

MASK = 2**32 - 1
LOGIT_RANGE = 8.0


class OracleModel(Decoder):
    """Keys are (token + 1, position); hidden states are the halves of a 32-bit hash. All exact in float32."""

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        pause: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """input_ids [T] and positions [T] -> [T, 2], or [N, 2] of the batch's last tokens; of a stage that passes on,
        the keys [T, 2]."""
        time.sleep(0.001 * self.config.num_layers)
        keys = self._keys(input_ids, positions, kv_cache.dtype)
        key_cache = kv_cache[:, 0, 0]
        kept = batch.slot_mapping >= 0
        slots, block_size = batch.slot_mapping[kept], key_cache.shape[1]
        key_cache[slots // block_size, slots % block_size] = keys[kept]
        if self.passes_on:
            return keys.squeeze(1)
        num_tokens = torch.diff(batch.query_start)
        rows = torch.repeat_interleave(torch.arange(len(batch.slots)), num_tokens)
        hashes = prefix_hashes(key_cache, batch)[rows, positions.long()]
        hashes = hashes if batch.last is None else hashes[batch.last.index]
        return torch.stack((hashes >> 16, hashes & 0xFFFF), dim=1).to(torch.float32)

    def _keys(self, input_ids: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T, 1, 2]; those of a stage are the ones that the stage before it has made."""
        keys = torch.stack((input_ids + 1, positions), dim=1).to(dtype)
        if self.passage is not None and not self.passage.stage.first:
            keys = self.passage.enter(len(keys), keys.shape[1], keys.dtype, keys.device)
        return keys.unsqueeze(1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, 2] -> float32 [R, V]."""
        halves = hidden.long()
        hashes = ((halves[:, 0] << 16) | halves[:, 1]).unsqueeze(1)
        assert self.head is not None
        tokens = torch.arange(self.head.own.start, self.head.own.stop).unsqueeze(0)
        return scramble(hashes + scramble(tokens)).to(torch.float32) * (LOGIT_RANGE / 2**32)


def prefix_hashes(key_cache: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """int64 [R, C]: of each row's first 1, 2, ... C tokens, as the cache has them; rubbish after the row's last."""
    block_size = key_cache.shape[1]
    num_blocks = -(-int(batch.context_lens.max()) // block_size)
    blocks = batch.block_tables.index_select(0, batch.slots)[:, :num_blocks].long()
    keys = key_cache[blocks.clamp(0, len(key_cache) - 1)].flatten(1, 2)[:, :, 0].long()
    places = torch.arange(keys.shape[1]).unsqueeze(0)
    told = scramble(scramble(keys[:, :, 0]) + keys[:, :, 1]) + scramble(places)
    return scramble(scramble(told).cumsum(1) & MASK)


def scramble(numbers: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash of each number (int64)."""
    numbers = (numbers * 0x9E3779B1 + 0x7F4A7C15) & MASK
    numbers = ((numbers ^ (numbers >> 15)) * 0x85EBCA77) & MASK
    return numbers ^ (numbers >> 13)
