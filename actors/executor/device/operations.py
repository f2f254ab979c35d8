"""The signatures of the operations a device has. What each does is said where it is defined, in :mod:`kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import AttentionPlan, AttentionShape, Spans
from pagebus.kernels.attention.prefill_plan import Ints, PrefillConfig, QuerySpans
from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.moe.routing import Routing
from pagebus.kernels.quantized.experts import Experts
from pagebus.kernels.quantized.layouts import Weight
from pagebus.kernels.quantized.products import Inputs

Tensor = torch.Tensor


class Embed(Protocol):
    """:func:`pagebus.kernels.layers.embedding.embedding`"""

    def __call__(self, input_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor: ...


class Norm(Protocol):
    """:func:`pagebus.kernels.layers.norm.rms_norm`"""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, centred: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class AddNorm(Protocol):
    """:func:`pagebus.kernels.layers.norm.add_rms_norm`"""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0, *, centred: bool = False,
        bias: Tensor | None = None, rounded: torch.dtype | None = None,
    ) -> Tensor | RoundedTokens: ...  # fmt: skip


class AddNormed(Protocol):
    """:func:`pagebus.kernels.layers.branch_norm.add_normed`"""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, following: Tensor | None
    ) -> Tensor | None: ...


class AddSum(Protocol):
    """:func:`pagebus.kernels.layers.norm.add_sum`"""

    def __call__(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> None: ...


class RowSquares(Protocol):
    """:func:`pagebus.kernels.layers.squares.row_squares`"""

    def __call__(self, x: Tensor) -> Tensor: ...


class SumParts(Protocol):
    """:func:`pagebus.kernels.layers.parts.sum_parts`"""

    def __call__(self, states: Tensor, firsts: Tensor, counts: Tensor) -> Tensor: ...


class CapLogits(Protocol):
    """:func:`pagebus.kernels.layers.logits.cap_logits`"""

    def __call__(self, logits: Tensor, scale: float, softcap: float) -> None: ...


class RotaryKvWrite(Protocol):
    """:func:`pagebus.kernels.layers.rotary_kv_write.rotary_kv_write`"""

    def __call__(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
        *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, kv_scales: Tensor | None,
    ) -> Tensor: ...  # fmt: skip


class Product(Protocol):
    """:func:`pagebus.kernels.quantized.products.linear`"""

    def __call__(
        self, x: Inputs, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor: ...


class GatedProduct(Protocol):
    """:func:`pagebus.kernels.quantized.products.gated_linear`"""

    def __call__(
        self, x: Inputs, weight: Weight, bias: Tensor | None = None, *, act: str = "silu",
        rounded: torch.dtype | None = None,
    ) -> Tensor | RoundedTokens: ...  # fmt: skip


class ResidualProduct(Protocol):
    """:func:`pagebus.kernels.quantized.products.partial_linear`"""

    def __call__(
        self, x: Tensor | RoundedTokens, weight: Weight, bias: Tensor | None, residual: Tensor | None,
        norm: NextNorm | None,
    ) -> Tensor | HalfNorm | None: ...  # fmt: skip


class Rounding(Protocol):
    """:func:`pagebus.kernels.quantized.products.rounding_of`"""

    def __call__(self, x: Inputs, weight: Weight, form: str) -> torch.dtype | None: ...


class Route(Protocol):
    """:func:`pagebus.kernels.moe.routing.route`"""

    def __call__(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, padding: Tensor | None = None,
        logit_bias: Tensor | None = None,
        counts: Tensor | None = None, own: range | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


class MoeExperts(Protocol):
    """:func:`pagebus.kernels.quantized.experts.moe_experts`"""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, layer: Experts) -> Tensor: ...


class AddShared(Protocol):
    """:func:`pagebus.kernels.moe.shared.add_shared`"""

    def __call__(self, total: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor: ...


class CutPrompts(Protocol):
    """:func:`pagebus.kernels.attention.paged_attention.cut_prompts`"""

    def __call__(
        self, query_start: Ints, context_lens: Ints, first_row: int, shape: AttentionShape, device: torch.device,
        most_spans: int | None = None, long_rows: Sequence[LongRow] = (), config: PrefillConfig | None = None,
    ) -> QuerySpans: ...  # fmt: skip


class PlanAttention(Protocol):
    """:func:`pagebus.kernels.attention.paged_attention.plan_attention`"""

    def __call__(
        self, slots: Tensor, context_lens: Tensor, shape: AttentionShape, spans: Spans | None = None, *,
        query_start: Tensor | None = None,
    ) -> AttentionPlan: ...  # fmt: skip


class PagedAttention(Protocol):
    """:func:`pagebus.kernels.attention.paged_attention.paged_attention`"""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor, query_start: Tensor, context_lens: Tensor,
        block_tables: Tensor, scale: float, num_decodes: int, sliding_window: int = 0, softcap: float = 0.0,
        sinks: Tensor | None = None, decode_lens: Tensor | None = None, kv_scales: Tensor | None = None,
        plan: AttentionPlan | None = None, long_rows: Sequence[LongRow] = (),
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor: ...  # fmt: skip


class RotaryAttention(Protocol):
    """:func:`pagebus.kernels.attention.rotary_attention.rotary_attention`"""

    def __call__(
        self, qkv: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor, context_lens: Tensor,
        block_tables: Tensor, scale: float, plan: AttentionPlan, sliding_window: int = 0, softcap: float = 0.0,
        sinks: Tensor | None = None, kv_scales: Tensor | None = None, q_norm: Tensor | None = None,
        k_norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor: ...  # fmt: skip


class LatentWrite(Protocol):
    """:func:`pagebus.kernels.latent.write.latent_write`"""

    def __call__(
        self, q: Tensor, latents: Tensor, positions: Tensor, cos_sin: Tensor, cache: Tensor, slot_mapping: Tensor, *,
        norm: Tensor, eps: float,
    ) -> None: ...  # fmt: skip


class HeadProduct(Protocol):
    """:func:`pagebus.kernels.latent.head_product.head_product`"""

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor: ...


class LatentAttention(Protocol):
    """:func:`pagebus.kernels.latent.attention.latent_attention`"""

    def __call__(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, *, slots: Tensor, query_start: Tensor, context_lens: Tensor,
        block_tables: Tensor, scale: float, num_decodes: int, plan: AttentionPlan, decode_lens: Tensor | None = None,
        long_rows: Sequence[LongRow] = (),
    ) -> Tensor: ...  # fmt: skip


class ExpandedAttention(Protocol):
    """:func:`pagebus.kernels.latent.expanded.expanded_attention`"""

    def __call__(
        self, q: Tensor, cache: Tensor, expansion: Tensor, out: Tensor, *, slots: Tensor, block_tables: Tensor,
        scale: float, rows: Sequence[LongRow],
    ) -> None: ...  # fmt: skip


class ScatterWords(Protocol):
    """:func:`pagebus.kernels.batch.scatter_words.scatter_words`"""

    def __call__(self, words: Tensor, places: Tensor, values: Tensor) -> None: ...


class PrepareInputs(Protocol):
    """:func:`pagebus.kernels.batch.inputs.prepare_inputs`"""

    def __call__(
        self, tokens: Tensor, block_tables: Tensor, slots: Tensor, starts: Tensor, query_start: Tensor,
        block_size: int, *, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, context_lens: Tensor,
    ) -> None: ...  # fmt: skip


class StoreSampled(Protocol):
    """:func:`pagebus.kernels.batch.inputs.store_sampled`"""

    def __call__(self, tokens: Tensor, slots: Tensor, positions: Tensor, sampled: Tensor) -> None: ...


class ResolveStarts(Protocol):
    """:func:`pagebus.kernels.batch.drafts.resolve_starts`"""

    def __call__(
        self, lengths: Tensor, slots: Tensor, starts: Tensor, decode_lens: Tensor, sample_slots: Tensor,
        sample_starts: Tensor, positions: Tensor, indexes: Tensor, sample_lens: Tensor,
    ) -> None: ...  # fmt: skip


class AcceptDrafts(Protocol):
    """:func:`pagebus.kernels.batch.drafts.accept_drafts`"""

    def __call__(
        self, sampled: Tensor, input_ids: Tensor, hidden_index: Tensor, indexes: Tensor, run_starts: Tensor,
        run_slots: Tensor, lengths: Tensor, found: Tensor, num_drafts: int, num_samples: int,
    ) -> Tensor: ...  # fmt: skip


class LookUpDrafts(Protocol):
    """:func:`pagebus.kernels.batch.draft_lookup.look_up_drafts`"""

    def __call__(
        self, tokens: Tensor, lengths: Tensor, found: Tensor, slots: Tensor, num_drafts: int, shortest: int,
        longest: int, vocab_size: int, out: Tensor, predicted: Tensor, first_predicted: int,
    ) -> None: ...  # fmt: skip


class PartGuesses(Protocol):
    """:func:`pagebus.kernels.batch.guesses.part_guesses`"""

    def __call__(self, logits: Tensor, first: int) -> Tensor: ...


class StoreGuesses(Protocol):
    """:func:`pagebus.kernels.batch.guesses.store_guesses`"""

    def __call__(
        self, logits: Tensor, token_ids: Tensor | None, following: Tensor, tokens: Tensor, slots: Tensor,
        starts: Tensor, ends: Tensor, features: Tensor,
    ) -> None: ...  # fmt: skip


class BeginChain(Protocol):
    """:func:`pagebus.kernels.batch.guesses.begin_chain`"""

    def __call__(
        self, slots: Tensor, query_start: Tensor, lengths: Tensor, kept: Tensor, lag: int, dummy_slot: int,
        chain: Tensor, features: Tensor,
    ) -> None: ...  # fmt: skip


class KeepFeatures(Protocol):
    """:func:`pagebus.kernels.batch.guesses.keep_features`"""

    def __call__(
        self, features: Tensor, slots: Tensor, starts: Tensor, query_start: Tensor, lengths: Tensor, kept: Tensor
    ) -> None: ...


class Sample(Protocol):
    """:func:`pagebus.kernels.sampling.sampling.sample`"""

    def __call__(
        self, logits: Tensor, slots: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
        seeds: Tensor, indexes: Tensor, *, any_random: bool, any_truncation: bool,
    ) -> Tensor: ...  # fmt: skip


class ApplyLogitRules(Protocol):
    """:func:`pagebus.kernels.sampling.logit_bias.apply_logit_rules`"""

    def __call__(
        self, logits: Tensor, slots: Tensor, indexes: Tensor, bias_ids: Tensor, bias_values: Tensor,
        bias_until: Tensor, first: int = 0,
    ) -> None: ...  # fmt: skip


class ApplyPenalties(Protocol):
    """:func:`pagebus.kernels.sampling.penalties.apply_penalties`"""

    def __call__(
        self, logits: Tensor, tokens: Tensor, slots: Tensor, prompt_lens: Tensor, lens: Tensor, repetition: Tensor,
        presence: Tensor, frequency: Tensor, first: int = 0,
    ) -> None: ...  # fmt: skip


class ApplyTokenMasks(Protocol):
    """:func:`pagebus.kernels.sampling.token_masks.apply_token_masks`"""

    def __call__(self, logits: Tensor, places: Tensor, masks: Tensor, first: int = 0) -> None: ...


class ApplyBadWords(Protocol):
    """:func:`pagebus.kernels.sampling.bad_words.apply_bad_words`"""

    def __call__(
        self, logits: Tensor, tokens: Tensor, slots: Tensor, prompt_lens: Tensor, indexes: Tensor,
        word_tokens: Tensor, word_lens: Tensor, first: int = 0,
    ) -> None: ...  # fmt: skip


class TokenLogprobs(Protocol):
    """:func:`pagebus.kernels.sampling.logprobs.token_logprobs`"""

    def __call__(self, logits: Tensor, tokens: Tensor, num_top: int) -> Tensor: ...


class PickLogits(Protocol):
    """:func:`pagebus.kernels.sampling.logprobs.pick_logits`"""

    def __call__(self, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor: ...


class CopyBlocks(Protocol):
    """:func:`pagebus.kernels.batch.copy_blocks.copy_blocks`"""

    def __call__(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None: ...
