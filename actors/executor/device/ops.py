"""The operations a device has: Triton kernels on CUDA, the torch references that define them on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagebus.actors.executor.device import adapter_operations, operations
from pagebus.actors.executor.device.comm import ONE_RANK, Comm
from pagebus.kernels.attention import paged_attention, rotary_attention
from pagebus.kernels.batch import copy_blocks, draft_lookup, drafts, guesses, inputs, scatter_words
from pagebus.kernels.common.cache_keys import settle_keys
from pagebus.kernels.latent import attention as latent
from pagebus.kernels.latent import expanded, head_product, write
from pagebus.kernels.latent import reference as latent_reference
from pagebus.kernels.layers import branch_norm, embedding, logits, norm, parts, rotary_kv_write, squares
from pagebus.kernels.lora import behind, plan, reference
from pagebus.kernels.lora import embedding as adapted_embedding
from pagebus.kernels.moe import routing, shared
from pagebus.kernels.moe.adapted import experts as adapted_experts
from pagebus.kernels.quantized import adapted, experts, products
from pagebus.kernels.sampling import bad_words, logit_bias, logprobs, penalties, sampling, token_masks


@dataclass(frozen=True, slots=True)
class Ops:
    """What the engine and the models call."""

    embedding: operations.Embed
    rms_norm: operations.Norm
    add_rms_norm: operations.AddNorm
    add_normed: operations.AddNormed
    cap_logits: operations.CapLogits
    rotary_kv_write: operations.RotaryKvWrite
    linear: operations.Product
    gated_linear: operations.GatedProduct
    partial_linear: operations.ResidualProduct
    route: operations.Route
    moe_experts: operations.MoeExperts
    add_shared: operations.AddShared
    cut_prompts: operations.CutPrompts
    plan_attention: operations.PlanAttention
    paged_attention: operations.PagedAttention
    rotary_attention: operations.RotaryAttention
    latent_write: operations.LatentWrite
    head_product: operations.HeadProduct
    latent_attention: operations.LatentAttention
    expanded_attention: operations.ExpandedAttention
    scatter_words: operations.ScatterWords
    prepare_inputs: operations.PrepareInputs
    store_sampled: operations.StoreSampled
    sample: operations.Sample
    apply_logit_rules: operations.ApplyLogitRules
    apply_penalties: operations.ApplyPenalties
    apply_token_masks: operations.ApplyTokenMasks
    apply_bad_words: operations.ApplyBadWords
    token_logprobs: operations.TokenLogprobs
    copy_blocks: operations.CopyBlocks
    plan_adapters: adapter_operations.PlanAdapters
    adapted_linear: adapter_operations.AdaptedProduct
    adapted_gated_linear: adapter_operations.AdaptedGatedProduct
    adapted_partial_linear: adapter_operations.AdaptedResidualProduct
    adapted_experts: adapter_operations.AdaptedExpertProducts
    add_adapters: adapter_operations.AddAdapters
    add_to_embedding: adapter_operations.AddToEmbedding
    add_sum: operations.AddSum = norm.add_sum
    row_squares: operations.RowSquares = squares.row_squares_reference
    sum_parts: operations.SumParts = parts.sum_parts_reference
    sorted_logprobs: operations.TokenLogprobs = logprobs.token_logprobs_reference
    """The same, with any number of alternatives."""
    pick_logits: operations.PickLogits = logprobs.pick_logits
    resolve_starts: operations.ResolveStarts = drafts.resolve_starts_on_cpu
    accept_drafts: operations.AcceptDrafts = drafts.accept_drafts_on_cpu
    look_up_drafts: operations.LookUpDrafts = draft_lookup.look_up_drafts_on_cpu
    part_guesses: operations.PartGuesses = guesses.part_guesses_reference
    store_guesses: operations.StoreGuesses = guesses.store_guesses_reference
    begin_chain: operations.BeginChain = guesses.begin_chain_reference
    keep_features: operations.KeepFeatures = guesses.keep_features_reference
    rounding: operations.Rounding = products.never_rounded
    comm: Comm = ONE_RANK
    """What the ranks of a group exchange."""

    @classmethod
    def for_device(cls, device: torch.device) -> Ops:
        """Torch and numpy on a CPU, Triton kernels elsewhere."""
        if device.type != "cpu":
            return cls.triton()
        return replace(
            cls.reference(),
            prepare_inputs=inputs.prepare_inputs_on_cpu,
            store_sampled=inputs.store_sampled_on_cpu,
        )

    @classmethod
    def triton(cls) -> Ops:
        """The kernels (on a CPU they need Triton's interpreter)."""
        settle_keys()
        return cls(
            embedding=embedding.embedding,
            rms_norm=norm.rms_norm,
            add_rms_norm=norm.add_rms_norm,
            add_normed=branch_norm.add_normed,
            cap_logits=logits.cap_logits,
            rotary_kv_write=rotary_kv_write.rotary_kv_write,
            linear=products.linear,
            gated_linear=products.gated_linear,
            partial_linear=products.partial_linear,
            route=routing.route,
            moe_experts=experts.moe_experts,
            add_shared=shared.add_shared,
            cut_prompts=paged_attention.cut_prompts,
            plan_attention=paged_attention.plan_attention,
            paged_attention=paged_attention.paged_attention,
            rotary_attention=rotary_attention.rotary_attention,
            latent_write=write.latent_write,
            head_product=head_product.head_product,
            latent_attention=latent.latent_attention,
            expanded_attention=expanded.expanded_attention,
            scatter_words=scatter_words.scatter_words,
            prepare_inputs=inputs.prepare_inputs,
            store_sampled=inputs.store_sampled,
            sample=sampling.sample,
            apply_logit_rules=logit_bias.apply_logit_rules,
            apply_penalties=penalties.apply_penalties,
            apply_token_masks=token_masks.apply_token_masks,
            apply_bad_words=bad_words.apply_bad_words,
            token_logprobs=logprobs.token_logprobs,
            copy_blocks=copy_blocks.copy_blocks,
            plan_adapters=plan.plan_step,
            adapted_linear=adapted.adapted_linear,
            adapted_gated_linear=adapted.adapted_gated_linear,
            adapted_partial_linear=adapted.adapted_partial_linear,
            adapted_experts=adapted_experts.adapted_experts,
            add_adapters=behind.add_adapters,
            add_to_embedding=adapted_embedding.add_to_embedding,
            rounding=products.rounding_of,
            row_squares=squares.row_squares,
            sum_parts=parts.sum_parts,
            resolve_starts=drafts.resolve_starts,
            accept_drafts=drafts.accept_drafts,
            look_up_drafts=draft_lookup.look_up_drafts,
            part_guesses=guesses.part_guesses,
            store_guesses=guesses.store_guesses,
            begin_chain=guesses.begin_chain,
            keep_features=guesses.keep_features,
        )

    @classmethod
    def reference(cls) -> Ops:
        """Plain torch, on any device."""
        return cls(
            embedding=embedding.embedding_reference,
            rms_norm=norm.rms_norm_reference,
            add_rms_norm=norm.add_rms_norm_reference,
            add_normed=branch_norm.add_normed_reference,
            cap_logits=logits.cap_logits_reference,
            rotary_kv_write=rotary_kv_write.rotary_kv_write_reference,
            linear=products.linear_reference,
            gated_linear=products.gated_linear_reference,
            partial_linear=products.partial_linear_reference,
            route=routing.route_reference,
            moe_experts=experts.moe_experts_reference,
            add_shared=shared.add_shared_reference,
            cut_prompts=paged_attention.cut_prompts_reference,
            plan_attention=paged_attention.plan_attention_reference,
            paged_attention=paged_attention.paged_attention_reference,
            rotary_attention=rotary_attention.rotary_attention_reference,
            latent_write=latent_reference.latent_write_reference,
            head_product=latent_reference.head_product_reference,
            latent_attention=latent_reference.latent_attention_reference,
            expanded_attention=latent_reference.expanded_attention_reference,
            scatter_words=scatter_words.scatter_words_reference,
            prepare_inputs=inputs.prepare_inputs_reference,
            store_sampled=inputs.store_sampled_reference,
            sample=sampling.sample_reference,
            apply_logit_rules=logit_bias.apply_logit_rules_reference,
            apply_penalties=penalties.apply_penalties_reference,
            apply_token_masks=token_masks.apply_token_masks_reference,
            apply_bad_words=bad_words.apply_bad_words_reference,
            token_logprobs=logprobs.token_logprobs_reference,
            copy_blocks=copy_blocks.copy_blocks_reference,
            plan_adapters=plan.plan_step_reference,
            adapted_linear=adapted.adapted_linear_reference,
            adapted_gated_linear=adapted.adapted_gated_linear_reference,
            adapted_partial_linear=adapted.adapted_partial_linear_reference,
            adapted_experts=adapted_experts.adapted_experts_reference,
            add_adapters=reference.add_adapters_reference,
            add_to_embedding=adapted_embedding.add_to_embedding_reference,
        )

    @classmethod
    def invariant(cls) -> Ops:
        """The kernels, and where a row's result depends on the other rows, slower ones with which it does not."""
        return replace(
            cls.triton(),
            rotary_kv_write=rotary_kv_write.rotary_kv_write_invariant,
            linear=products.linear_invariant,
            gated_linear=products.gated_linear_invariant,
            partial_linear=products.partial_linear_invariant,
            rounding=products.never_rounded,
            moe_experts=experts.moe_experts_invariant,
            cut_prompts=paged_attention.cut_prompts_invariant,
            plan_attention=paged_attention.plan_attention_invariant,
            paged_attention=paged_attention.paged_attention_invariant,
            head_product=head_product.head_product_invariant,
            latent_attention=latent.latent_attention_invariant,
            plan_adapters=plan.plan_step_invariant,
            adapted_linear=adapted.adapted_linear_invariant,
            adapted_gated_linear=adapted.adapted_gated_linear_invariant,
            adapted_partial_linear=adapted.adapted_partial_linear_invariant,
            adapted_experts=adapted_experts.adapted_experts_invariant,
        )
