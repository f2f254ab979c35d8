"""Steps that an engine runs on made-up sequences before it is ready: to measure memory and to compile kernels.

They go the way of every step, through :meth:`PersistentBatch.apply` and :meth:`Runner.run`; all blocks are block 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.buckets import LONG_CONTEXT
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.logprob_rows import MAX_TOP
from pagebus.actors.executor.step.runner import Runner
from pagebus.bus.messages import NewSequence, SamplingParams, StepPlan
from pagebus.kernels.attention.cudnn_prefill import PIECES
from pagebus.kernels.linear import shapes

RANDOM, GREEDY, EXTRAS, POOLED = "random", "greedy", "extras", "pooled"
"""How made-up sequences are sampled. Extras: everything at once that is done apart from plain sampling, and pooling.
Pooled: as random, and pooled."""


def _new(slot: int, num_tokens: int, limits: BatchLimits, sampling: str, computed: int = 0) -> NewSequence:
    return NewSequence(
        sequence_id=slot + 1,
        slot=slot,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        num_blocks=limits.table_width,
        max_total_tokens=limits.max_model_len,
        seed=slot,
        sampling=_sampling(sampling, limits.vocab_size),
        end_token_ids=(0,) if sampling == EXTRAS else (),
        pooled_from=0 if sampling in (EXTRAS, POOLED) else None,
    )


def _sampling(how: str, vocab_size: int) -> SamplingParams:
    if how != EXTRAS:
        return SamplingParams(temperature=0.0 if how == GREEDY else 1.0)
    return SamplingParams(
        min_tokens=1,
        top_p=0.9,
        top_k=min(8, vocab_size - 1),
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=MAX_TOP,
        prompt_logprobs=MAX_TOP,
        bad_words_token_ids=((0, 0),),
        allowed_token_ids=tuple(range(min(8, vocab_size))),
    )


def _entering(lengths: Sequence[int], limits: BatchLimits, sampling: str) -> StepPlan:
    """All sequences enter and compute all their tokens."""
    return StepPlan(
        step=1,
        planned_s=0.0,
        num_decodes=0,
        new_sequences=tuple(_new(slot, length, limits, sampling) for slot, length in enumerate(lengths)),
        new_token_ids=np.zeros(sum(lengths), np.int32),
        new_block_ids=np.zeros(len(lengths) * limits.table_width, np.int32),
        new_windowed=np.zeros(len(lengths) * limits.table_width * limits.windowed_pages, np.int32),
        slots=np.arange(len(lengths), dtype=np.int32),
        num_scheduled=np.array(lengths, np.int32),
    )


def _decoding(num_rows: int) -> StepPlan:
    slots = np.arange(num_rows, dtype=np.int32)
    return StepPlan(step=2, planned_s=0.0, num_decodes=num_rows, slots=slots, num_scheduled=np.ones(num_rows, np.int32))


def _lengths(limits: BatchLimits, num_rows: int, total: int) -> list[int]:
    """About ``total`` tokens over ``num_rows`` rows, each leaving room for two more."""
    longest = max(1, limits.max_model_len - 2)
    return [max(1, min(longest, total // num_rows))] * num_rows


def full_prompt_steps(limits: BatchLimits, *, samples: bool = True) -> list[StepPlan]:
    """The largest prompt steps there can be, each for an empty batch: few long prompts, many with every kind of
    sampling, many plain ones. Of a model that only pools none ``samples``, but they are pooled."""
    budget = limits.max_num_batched_tokens
    many = min(limits.max_num_seqs, budget)
    few = min(many, max(1, budget // max(1, limits.max_model_len - 2)))
    if limits.max_model_len < 2:
        return []
    return [
        _entering(_lengths(limits, num_rows, budget), limits, sampling)
        for num_rows, sampling in ((few, RANDOM), (many, EXTRAS if samples else POOLED), (many, RANDOM))
    ]


def long_steps(limits: BatchLimits) -> list[StepPlan]:
    """Ends of a prompt that is long enough for every kernel of long prompts, each for an empty batch: behind a past, if
    any is left, the largest chunk, a last token alone, and the shortest chunk that attends as prompts do; and the
    largest chunk beside a decode, where attention goes another way."""
    budget = limits.max_num_batched_tokens
    longest = min(limits.max_model_len - 2, budget + LONG_CONTEXT)
    steps = []
    for count in sorted({budget, min(budget, limits.longest_run + 1), 1}, reverse=True):
        if (past := longest - count) > 0:
            whole = (
                past // PIECES[-1] * PIECES[-1] or past
            )  # behind whole pieces a library's attention is the most likely
            steps.append(_chunk([], whole + count, count, limits))
    beside = min(budget - 1, longest)
    if beside > 0 and limits.max_num_seqs > 1:
        steps.append(_chunk([1], longest, beside, limits))
    return steps


def _chunk(decodes: list[int], context: int, count: int, limits: BatchLimits) -> StepPlan:
    """The last ``count`` tokens of a context, beside sequences of one token."""
    lengths = [*decodes, context]
    chunk = _new(len(decodes), context, limits, GREEDY, computed=context - count)
    step = _entering(lengths, limits, GREEDY)
    return replace(
        step, num_decodes=len(decodes), new_sequences=(*step.new_sequences[:-1], chunk),
        num_scheduled=np.array([*decodes, count], np.int32),
    )  # fmt: skip


def small_steps(
    limits: BatchLimits, *, thorough: bool, counts: Sequence[int] = (), samples: bool = True
) -> list[list[StepPlan]]:
    """Groups of small and odd steps, each group for an empty batch: prompts, then decodes; random, and if ``thorough``
    also longer ones, with every sampling, and one for each number of tokens for which products have own kernels, and
    for each of ``counts``."""
    groups = []
    for sampling in (RANDOM, GREEDY, EXTRAS if samples else POOLED) if thorough else (RANDOM,):
        for wanted in ([1], [17, 3, 1]) if thorough else ([1],):
            lengths = [length for length in wanted if length <= limits.max_model_len - 3][: limits.max_num_seqs]
            if lengths and sum(lengths) <= limits.max_num_batched_tokens:
                groups.append([_entering(lengths, limits, sampling), _decoding(len(lengths)), _decoding(1)])
    for num_tokens in sorted({*shapes.BUCKETS, *counts}) if thorough else ():
        num_rows = min(num_tokens, limits.max_num_seqs)
        lengths = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
        if lengths[0] <= limits.max_model_len - 2 and num_tokens <= limits.max_num_batched_tokens:
            groups.append([_entering(lengths, limits, RANDOM)])
    return groups


def samples(runner: Runner) -> bool:
    """Whether tokens of its model are read by anybody."""
    return runner.model.config.pooler is None


def run_full_steps(batch: PersistentBatch, runner: Runner) -> tuple[int, int]:
    """Run the largest steps there can be, on CUDA, the last of them with every sequence decoding.

    Returns (bytes that the largest of those that are captured took beyond what stays, peak bytes of all of them).
    """
    limits, plans = batch.limits, full_prompt_steps(batch.limits, samples=samples(runner))
    for plan in plans:
        batch.reset()
        runner.run(batch.apply(plan))
    torch.cuda.synchronize()
    peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if limits.max_model_len > 2:
        runner.run(batch.apply(_decoding(len(plans[-1].slots))))
        run_drafts(batch, runner, limits.verified_tokens)
        torch.cuda.synchronize()
    captured_peak = torch.cuda.max_memory_allocated()
    run_drafts(batch, runner)  # more of them than any graph
    torch.cuda.synchronize()
    batch.reset()
    return captured_peak - before, max(peak, torch.cuda.max_memory_allocated())


MEASURED_TOKENS, MEASURED_TOKENS_ON_CPU = 2048, 32
MEASURED_RUNS = 2
"""The quicker one counts: the first may compile something, a busy host may delay the other."""


def measure_prefill_rate(batch: PersistentBatch, runner: Runner) -> float:
    """Prompt tokens per second, by the clock, of a step with as many as matter; 0.0 where no prompt fits."""
    limits, cuda = batch.limits, runner.kv_cache.is_cuda
    wanted = MEASURED_TOKENS if cuda else MEASURED_TOKENS_ON_CPU
    num_tokens = min(wanted, limits.max_num_batched_tokens, limits.max_model_len - 2)
    if num_tokens < 1:
        return 0.0
    plan, seconds = _entering([num_tokens], limits, RANDOM), []
    for _ in range(MEASURED_RUNS):
        batch.reset()
        began = time.perf_counter()
        runner.run(batch.apply(plan))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    batch.reset()
    return num_tokens / min(seconds)


def run_all_steps(batch: PersistentBatch, runner: Runner) -> None:
    """Launch all that the functions here launch, where there is nothing to measure."""
    run_long_steps(batch, runner)
    for plan in full_prompt_steps(batch.limits, samples=samples(runner)):
        batch.reset()
        runner.run(batch.apply(plan))
    if batch.limits.max_model_len > 2:
        runner.run(batch.apply(_decoding(batch.num_occupied)))
        run_drafts(batch, runner)
    run_small_steps(batch, runner, thorough=True)


def run_drafts(batch: PersistentBatch, runner: Runner, most_tokens: int | None = None) -> None:
    """Verify as many drafts as a step can, or one of ``most_tokens``, of sequences all of whose tokens are computed."""
    limits, width = batch.limits, 1 + batch.limits.num_drafts
    slots = np.flatnonzero(batch.sequence_ids).astype(np.int32)
    fits = batch.num_computed[slots] + width < limits.max_model_len
    slots = slots[fits][: (most_tokens or limits.max_num_batched_tokens) // width]
    if width == 1 or not len(slots):
        return
    starts, counts = batch.num_computed[slots], np.full(len(slots), width, np.int32)
    plan = StepPlan(
        step=3, planned_s=0.0, num_decodes=0, slots=slots, num_scheduled=counts, earliest_starts=starts,
        latest_starts=starts,
    )  # fmt: skip
    runner.run(batch.apply(plan))


def run_head(batch: PersistentBatch, runner: Runner) -> None:
    """Have a draft head guess, if there is one, for one sequence and for many."""
    limits, length = batch.limits, min(8, batch.limits.max_model_len - 2)
    if runner.head is None or length < 1:
        return
    for count in {1, min(limits.max_num_seqs, max(1, limits.max_num_batched_tokens // length))}:
        batch.reset()
        runner.run(batch.apply(_entering([length] * count, limits, GREEDY)))
        run_drafts(batch, runner)
    batch.reset()


def run_long_steps(batch: PersistentBatch, runner: Runner) -> None:
    """Run ends of long prompts, whose kernels no other step needs: to load one takes longer than such a step."""
    for plan in long_steps(batch.limits):
        batch.reset()
        runner.run(batch.apply(plan))
    batch.reset()


def run_small_steps(batch: PersistentBatch, runner: Runner, *, thorough: bool) -> None:
    """Run small steps, so that nothing is compiled or set up for the first time when a request waits."""
    counts = runner.chooser.expert_counts(batch.limits.max_num_batched_tokens) + runner.chooser.wide_counts()
    for plans in small_steps(batch.limits, thorough=thorough, counts=counts, samples=samples(runner)):
        batch.reset()
        for plan in plans:
            runner.run(batch.apply(plan))
    batch.reset()


def run_adapted_steps(batch: PersistentBatch, runner: Runner) -> None:
    """If sequences may have adapters, run small steps and the largest as if some had one."""
    if runner.adapters is None:
        return
    thorough = runner.kv_cache.device.type != "cpu"
    with runner.adapters.assumed():
        run_small_steps(batch, runner, thorough=thorough)
        for plan in full_prompt_steps(batch.limits) if thorough else ():
            batch.reset()
            runner.run(batch.apply(plan))
    batch.reset()
