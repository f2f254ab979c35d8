"""Changes to logits of which a rank has a range of the vocabulary. Tokens of others are left to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.ops import Ops
from pagebus.kernels.sampling.bad_words import banned_reference

NOBODY = -1


class RankLogits:
    """As the operations of the same names, for logits [R, len(own)] of the tokens ``own``; ``ops`` take part."""

    def __init__(self, ops: Ops, own: range) -> None:
        self._ops, self._own = ops, own

    def apply_logit_rules(
        self, logits: torch.Tensor, slots: torch.Tensor, indexes: torch.Tensor, bias_ids: torch.Tensor,
        bias_values: torch.Tensor, bias_until: torch.Tensor,
    ) -> None:  # fmt: skip
        """Biases, and bans that end."""
        self._ops.apply_logit_rules(logits, slots, indexes, self._places(bias_ids, NOBODY), bias_values, bias_until)

    def apply_token_masks(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        """Permanent masks, and those of grammars."""
        used = masks.index_select(0, places.clamp(min=0))
        rows = torch.arange(len(places), dtype=places.dtype, device=places.device)
        self._ops.apply_token_masks(logits, torch.where(places < 0, places, rows), mask_part(used, self._own))

    def apply_bad_words(
        self, logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, prompt_lens: torch.Tensor,
        indexes: torch.Tensor, word_tokens: torch.Tensor, word_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Words of several tokens."""
        if word_tokens.shape[1]:
            rows, ids = banned_reference(tokens, slots, prompt_lens, indexes, word_tokens, word_lens)
            places = self._places(ids, NOBODY)
            logits[rows[places >= 0], places[places >= 0]] = -torch.inf

    def apply_penalties(
        self, logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, prompt_lens: torch.Tensor,
        lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
    ) -> None:  # fmt: skip
        """Penalties. A column behind the others takes those of tokens of other ranks."""
        width = len(self._own)
        wider = F.pad(logits, (0, 1))
        seen = self._places(tokens[:, : int(lens.max())].index_select(0, slots), width)
        rows = torch.arange(len(slots), dtype=slots.dtype, device=slots.device)
        self._ops.apply_penalties(wider, seen, rows, prompt_lens, lens, repetition, presence, frequency)
        logits.copy_(wider[:, :width])

    def _places(self, ids: torch.Tensor, elsewhere: int) -> torch.Tensor:
        """Where the tokens lie in the rank's part; ``elsewhere`` for those of others."""
        mine = (ids >= self._own.start) & (ids < self._own.stop)
        return torch.where(mine, ids - self._own.start, elsewhere)


def mask_part(masks: torch.Tensor, own: range) -> torch.Tensor:
    """Of masks [M, ceil(V / 32)] int32, a bit per token, those of the tokens ``own``: [M, ceil(len(own) / 32)]."""
    first, shift = divmod(own.start, 32)
    count = -(-len(own) // 32)
    words = F.pad(masks[:, first : first + count + 1], (0, max(0, first + count + 1 - masks.shape[1])))
    if not shift:
        return words[:, :count].contiguous()
    low = (words[:, :count] >> shift) & ((1 << (32 - shift)) - 1)
    return low | (words[:, 1 : count + 1] << (32 - shift))
