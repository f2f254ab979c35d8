"""Samples tokens from logits. Plain sampling is cheap enough for every row of every step and runs inside the CUDA
graphs. Everything else (truncation, penalties, masks, bans and biases) is computed again for the rows that use it, and
does not change other rows."""

from __future__ import annotations

import torch

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from pagebus.actors.executor.batch.step_work import Extras
from pagebus.actors.executor.device.ops import Ops


class Sampler:
    """Samples with the columns that :class:`DeviceBatch` holds for each slot."""

    def __init__(self, ops: Ops, state: DeviceBatch) -> None:
        self._ops = ops
        self._state = state

    def plain(
        self, logits: torch.Tensor, slots: torch.Tensor, indexes: torch.Tensor, *, any_random: bool
    ) -> torch.Tensor:
        """Temperature and noise only. ``logits`` [N, V] float32, ``slots`` and ``indexes`` [N]; tokens [N] int32."""
        return self._sample(logits, slots, indexes, any_random=any_random, any_truncation=False)

    def _sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        indexes: torch.Tensor,
        *,
        any_random: bool,
        any_truncation: bool,
    ) -> torch.Tensor:
        columns = self._state.columns
        floats = columns.view(torch.float32)
        return self._ops.sample(
            logits,
            slots,
            floats[TEMPERATURE],
            columns[TOP_K],
            floats[TOP_P],
            floats[MIN_P],
            self._state.seeds,
            indexes,
            any_random=any_random,
            any_truncation=any_truncation,
        )

    def extras(
        self,
        extras: Extras,
        logits: torch.Tensor,
        slots: torch.Tensor,
        indexes: torch.Tensor,
        mask_places: torch.Tensor,
        *,
        any_random: bool,
    ) -> torch.Tensor:
        """Tokens [E] int32 of rows with these ``logits`` [E, V], which change, ``slots``, ``indexes`` and, if any is
        constrained, places among the step's masks [E]. Order as in vLLM: bans and biases, penalties, temperature,
        min-p, top-k, top-p."""
        state = self._state
        if extras.ruled:
            self._ops.apply_logit_rules(logits, slots, indexes, state.rule_ids, state.rule_values, state.rule_until)
        if extras.masked:
            self._ops.apply_token_masks(logits, slots, state.masks)
        if extras.constrained:
            self._ops.apply_token_masks(logits, mask_places, state.step_masks.masks)
        if extras.worded:
            prompt_lens = state.columns[PROMPT_LEN].index_select(0, slots)
            self._ops.apply_bad_words(
                logits, state.tokens, slots, prompt_lens, indexes, state.word_tokens, state.word_lens
            )
        if extras.penalized:
            columns = state.columns.index_select(1, slots)
            floats = columns.view(torch.float32)
            self._ops.apply_penalties(
                logits,
                state.tokens,
                slots,
                columns[PROMPT_LEN],
                columns[PROMPT_LEN] + indexes,
                floats[REPETITION],
                floats[PRESENCE],
                floats[FREQUENCY],
            )
        return self._sample(logits, slots, indexes, any_random=any_random, any_truncation=extras.truncated)
