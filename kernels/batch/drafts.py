"""Steps of sequences whose lengths only the device knows: where their rows begin, and which drafts are accepted.

Drafts lie in the token table behind a sequence's last token. A row that verifies some computes the last token and them,
and samples behind each. The host lays such a row out for the latest start that is possible.
"""

from __future__ import annotations

import numpy as np
import torch

from pagebus.kernels.common.triton import next_power_of_2, tl, triton


def resolve_starts_reference(
    lengths: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    decode_lens: torch.Tensor,
    sample_slots: torch.Tensor,
    sample_starts: torch.Tensor,
    positions: torch.Tensor,
    indexes: torch.Tensor,
    sample_lens: torch.Tensor,
) -> None:
    """Move rows that were laid out too late to where they begin, in place: all numbers of a row are smaller by as much
    as its start lies behind its sequence's last token.

    lengths [S] (tokens, the last one's keys not computed); slots, starts, decode_lens (0: none) [R] by row;
    sample_slots, sample_starts (of its row), positions (negative: none), indexes, sample_lens [N] by sample. All int32.
    """
    late = (starts - lengths[slots.long()] + 1).clamp_(min=0)
    starts -= late
    decode_lens -= torch.where(decode_lens > 0, late, 0)
    late = (sample_starts - lengths[sample_slots.long()] + 1).clamp_(min=0)
    positions -= torch.where(positions >= 0, late, 0)
    indexes -= late
    sample_lens -= late


def accept_drafts_reference(
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_index: torch.Tensor,
    indexes: torch.Tensor,
    run_starts: torch.Tensor,
    run_slots: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    num_drafts: int,
    num_samples: int,
) -> torch.Tensor:
    """Accept the drafts of each row that are what was sampled in their places, as far as the first that is not; the
    sequences become longer by them, and by the token sampled behind the last one.

    In:  sampled, hidden_index, indexes [>= N]: tokens, behind which tokens of the pass, and their output indexes;
         input_ids [T]. Samples run_starts[m]:run_starts[m + 1] are those of a row, num_drafts + 1 at most, of the
         sequence in slot run_slots[m]. found [S]: how many of the drafts behind lengths [S] exist. N is num_samples.
    Out: [N + 3 M] int32: the N tokens; then by row how many of its tokens count, the output index of the first, and
         room for one more number. lengths change.
    """
    widths, slots, begin = run_starts.diff(), run_slots.long(), run_starts[:-1].long()
    count, rows = num_samples, len(run_slots)
    verified = torch.minimum(widths - 1, found[slots])
    accepted = torch.zeros_like(verified)
    most = min(int(verified.max()), num_drafts) if rows else 0
    if most > 0:
        place = torch.arange(most, device=sampled.device)
        sample = (begin.unsqueeze(1) + place).clamp_(max=count - 1)
        drafts = input_ids[(hidden_index[sample].long() + 1).clamp_(0, len(input_ids) - 1)]
        same = (drafts == sampled[sample]) & (place < verified.unsqueeze(1))
        accepted += same.cumprod(1).sum(1).to(accepted.dtype)
    lengths[slots] += accepted + 1
    return torch.cat([sampled[:count], accepted + 1, indexes[begin], torch.zeros_like(accepted)])


def resolve_starts_on_cpu(
    lengths: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    decode_lens: torch.Tensor,
    sample_slots: torch.Tensor,
    sample_starts: torch.Tensor,
    positions: torch.Tensor,
    indexes: torch.Tensor,
    sample_lens: torch.Tensor,
) -> None:
    """As `resolve_starts_reference`; for a few rows numpy is several times faster."""
    known, first = lengths.numpy(), starts.numpy()
    late = np.maximum(first - known[slots.numpy()] + 1, 0)
    if not late.any():
        return
    first -= late
    lens, place = decode_lens.numpy(), positions.numpy()
    lens -= np.where(lens > 0, late, 0)
    late = np.maximum(sample_starts.numpy() - known[sample_slots.numpy()] + 1, 0)
    place -= np.where(place >= 0, late, 0)
    for column in (indexes.numpy(), sample_lens.numpy()):
        column -= late


def accept_drafts_on_cpu(
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_index: torch.Tensor,
    indexes: torch.Tensor,
    run_starts: torch.Tensor,
    run_slots: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    num_drafts: int,
    num_samples: int,
) -> torch.Tensor:
    """As `accept_drafts_reference`; where no row has drafts there is little to do."""
    rows = len(run_slots)
    if rows < num_samples:
        return accept_drafts_reference(
            sampled, input_ids, hidden_index, indexes, run_starts, run_slots, lengths, found, num_drafts, num_samples
        )
    lengths.numpy()[run_slots.numpy()] += 1
    told = np.zeros(num_samples + 3 * rows, np.int32)
    told[:rows], told[rows : 2 * rows], told[2 * rows : 3 * rows] = sampled.numpy()[:rows], 1, indexes.numpy()[:rows]
    return torch.from_numpy(told)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "slots_ptr", "starts_ptr", "decode_lens_ptr",
                               "sample_slots_ptr", "sample_starts_ptr", "positions_ptr", "indexes_ptr",
                               "sample_lens_ptr"])  # fmt: skip
def _resolve_starts_kernel(
    lengths_ptr,  # [S]
    slots_ptr,  # [R]
    starts_ptr,  # [R] in and out
    decode_lens_ptr,  # [R] in and out
    sample_slots_ptr,  # [N]
    sample_starts_ptr,  # [N]
    positions_ptr,  # [N] in and out
    indexes_ptr,  # [N] in and out
    sample_lens_ptr,  # [N] in and out
    num_rows,
    num_samples,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_sample = at < num_rows, at < num_samples
    start = tl.load(starts_ptr + at, mask=is_row, other=0)
    length = tl.load(lengths_ptr + tl.load(slots_ptr + at, mask=is_row, other=0), mask=is_row, other=1)
    late = tl.maximum(start - length + 1, 0)
    tl.store(starts_ptr + at, start - late, mask=is_row)
    decode_len = tl.load(decode_lens_ptr + at, mask=is_row, other=0)
    tl.store(decode_lens_ptr + at, decode_len - late, mask=is_row & (decode_len > 0))

    start = tl.load(sample_starts_ptr + at, mask=is_sample, other=0)
    length = tl.load(lengths_ptr + tl.load(sample_slots_ptr + at, mask=is_sample, other=0), mask=is_sample, other=1)
    late = tl.maximum(start - length + 1, 0)
    position = tl.load(positions_ptr + at, mask=is_sample, other=-1)
    tl.store(positions_ptr + at, position - late, mask=is_sample & (position >= 0))
    tl.store(indexes_ptr + at, tl.load(indexes_ptr + at, mask=is_sample, other=0) - late, mask=is_sample)
    tl.store(sample_lens_ptr + at, tl.load(sample_lens_ptr + at, mask=is_sample, other=0) - late, mask=is_sample)


def resolve_starts(
    lengths: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    decode_lens: torch.Tensor,
    sample_slots: torch.Tensor,
    sample_starts: torch.Tensor,
    positions: torch.Tensor,
    indexes: torch.Tensor,
    sample_lens: torch.Tensor,
) -> None:
    """Move rows that were laid out too late, in place; see `resolve_starts_reference`."""
    num_rows, num_samples = len(slots), len(sample_starts)
    assert starts.shape == decode_lens.shape == slots.shape
    for vector in (sample_slots, positions, indexes, sample_lens):
        assert vector.shape == sample_starts.shape
        assert vector.is_contiguous()
    if num_rows:
        block = 128
        _resolve_starts_kernel[(-(-max(num_rows, num_samples) // block),)](
            lengths, slots, starts, decode_lens, sample_slots, sample_starts, positions, indexes, sample_lens,
            num_rows, num_samples, BLOCK=block, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_runs", "sampled_ptr", "hidden_index_ptr", "indexes_ptr",
                               "run_starts_ptr", "run_slots_ptr"])  # fmt: skip
def _accept_drafts_kernel(
    sampled_ptr,  # [>= N]
    input_ids_ptr,  # [T]
    hidden_index_ptr,  # [>= N]
    indexes_ptr,  # [>= N]
    run_starts_ptr,  # [M + 1]
    run_slots_ptr,  # [M]
    lengths_ptr,  # [S] in and out
    found_ptr,  # [S]
    out_ptr,  # [N + 3 M]
    num_samples,
    num_runs,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,  # more than NUM_DRAFTS
):
    run = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    begin = tl.load(run_starts_ptr + run)
    width = tl.load(run_starts_ptr + run + 1) - begin
    slot = tl.load(run_slots_ptr + run)
    verified = tl.minimum(tl.minimum(width - 1, tl.load(found_ptr + slot)), NUM_DRAFTS)
    token = tl.load(sampled_ptr + begin + place, mask=place < width, other=-1)
    tl.store(out_ptr + begin + place, token, mask=place < width)
    asked = place < verified
    behind = tl.load(hidden_index_ptr + begin + place, mask=asked, other=0)
    draft = tl.load(input_ids_ptr + behind + 1, mask=asked, other=-1)
    accepted = tl.min(tl.where(asked & (draft == token), BLOCK, place), axis=0)
    tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + accepted + 1)
    told = out_ptr + num_samples + run
    tl.store(told, accepted + 1)
    tl.store(told + num_runs, tl.load(indexes_ptr + begin))


def accept_drafts(
    sampled: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_index: torch.Tensor,
    indexes: torch.Tensor,
    run_starts: torch.Tensor,
    run_slots: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    num_drafts: int,
    num_samples: int,
) -> torch.Tensor:
    """Accept drafts; see `accept_drafts_reference`."""
    num_runs = len(run_slots)
    assert run_starts.shape == (num_runs + 1,)
    assert min(len(sampled), len(hidden_index), len(indexes)) >= num_samples
    assert sampled.is_contiguous()
    out = torch.empty(num_samples + 3 * num_runs, dtype=torch.int32, device=sampled.device)
    if num_runs:
        _accept_drafts_kernel[(num_runs,)](
            sampled, input_ids, hidden_index, indexes, run_starts, run_slots, lengths, found, out, num_samples,
            num_runs, NUM_DRAFTS=num_drafts, BLOCK=next_power_of_2(num_drafts + 1), num_warps=1,
        )  # fmt: skip
    return out
