"""Builds one pass's model inputs from the persistent batch on the device, and stores the sampled tokens."""

from __future__ import annotations

import numpy as np
import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton


def prepare_inputs_reference(
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    block_size: int,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """Fill the model inputs of one pass.

    In:  tokens [S, L] int32, block_tables [S, MB] int32 (both by slot), slots [R], starts [R] (position of a row's
         first scheduled token), query_start [R + 1] (ascending; row r owns tokens query_start[r]:query_start[r + 1]).
    Out: input_ids [T], positions [T], slot_mapping [T] int64, context_lens [R] (start + scheduled tokens). Of several
         tables [N, S, MB] there are as many mappings [N, T].
    Tokens past query_start[R], and tokens of rows with a negative start (padding rows), get id 0, position 0 and
    mapping -1; such rows get context length 0. A negative block id also gives mapping -1.
    """
    num_rows, num_tokens = slots.shape[0], input_ids.shape[0]
    padding = starts < 0
    context_lens.copy_(torch.where(padding, 0, starts + query_start.diff()))
    token = torch.arange(num_tokens, device=slots.device, dtype=query_start.dtype)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    inside = row < num_rows
    row = row.clamp_(max=num_rows - 1)
    inside &= ~padding[row]
    position = torch.where(inside, starts[row] + token - query_start[row], 0).long()
    slot = torch.where(inside, slots[row], 0).long()
    block = block_tables[..., slot, position // block_size].long()
    input_ids.copy_(torch.where(inside, tokens[slot, position], 0))
    positions.copy_(position)
    slot_mapping.copy_(torch.where(inside & (block >= 0), block * block_size + position % block_size, -1))


def store_sampled_reference(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
) -> None:
    """tokens[slots[r], positions[r]] = sampled[r] where positions[r] >= 0.

    tokens [S, L] int32; slots, positions, sampled [R].
    """
    rows = (positions >= 0).nonzero().squeeze(1)
    tokens[slots[rows].long(), positions[rows].long()] = sampled[rows].to(tokens.dtype)


def prepare_inputs_on_cpu(
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    block_size: int,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """As `prepare_inputs_reference`; for the tokens of most steps numpy is several times faster."""
    first, begins = starts.numpy(), query_start.numpy()
    counts = np.diff(begins)
    np.copyto(context_lens.numpy(), np.where(first < 0, 0, first + counts))
    rows = np.repeat(np.arange(len(counts)), counts)
    token = np.flatnonzero(first[rows] >= 0)
    rows = rows[token]
    position, slot = first[rows] + token - begins[rows], slots.numpy()[rows]
    block = block_tables.numpy()[..., slot, position // block_size].astype(np.int64)
    for tensor, values, nothing in (
        (input_ids, tokens.numpy()[slot, position], 0),
        (positions, position, 0),
        (slot_mapping, np.where(block >= 0, block * block_size + position % block_size, -1), -1),
    ):
        target = tensor.numpy()
        if len(token) < target.shape[-1]:
            target[...] = nothing
        target[..., token] = values


def store_sampled_on_cpu(
    tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor
) -> None:
    """As `store_sampled_reference`."""
    rows = np.flatnonzero(positions.numpy() >= 0)
    tokens.numpy()[slots.numpy()[rows], positions.numpy()[rows]] = sampled.numpy()[rows]


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "tokens_ptr", "slots_ptr", "starts_ptr", "query_start_ptr",
                               "input_ids_ptr", "positions_ptr", "slot_mapping_ptr",
                               "context_lens_ptr"])  # fmt: skip
def _prepare_inputs_kernel(
    tokens_ptr,  # [S, L] int32
    tables_ptr,  # [S, MB] int32
    slots_ptr,  # [R]
    starts_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    input_ids_ptr,  # [T] out
    positions_ptr,  # [T] out
    slot_mapping_ptr,  # [T] int64 out
    context_lens_ptr,  # [R] out
    stride_tokens,
    stride_table,
    num_rows,  # R
    num_tokens,  # T
    stride_tables,  # from a block table to the next
    stride_mapping,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TABLES: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # As a row: its context length.
    is_row = index < num_rows
    start = tl.load(starts_ptr + index, mask=is_row, other=-1)
    begin = tl.load(query_start_ptr + index, mask=is_row, other=0)
    end = tl.load(query_start_ptr + index + 1, mask=is_row, other=0)
    length = tl.where(start < 0, 0, start + end - begin)
    tl.store(context_lens_ptr + index, length.to(context_lens_ptr.dtype.element_ty), mask=is_row)

    # As a token: the last row that begins at or before it. In a decode pass that is the row of the same index.
    guessed = is_row & (begin <= index) & (index < end)
    low = tl.where(guessed, index, 0)
    high = tl.where(guessed, index, num_rows - 1)
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high + 1) // 2
        below = tl.load(query_start_ptr + middle) <= index
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)

    start = tl.load(starts_ptr + low)
    inside = (index < tl.load(query_start_ptr + low + 1)) & (start >= 0) & (index < num_tokens)
    position = tl.where(inside, start + index - tl.load(query_start_ptr + low), 0)
    slot = tl.load(slots_ptr + low).to(tl.int64)
    token_id = tl.load(tokens_ptr + slot * stride_tokens + position, mask=inside, other=0)
    place = slot * stride_table + position // BLOCK_SIZE
    is_token = index < num_tokens
    tl.store(input_ids_ptr + index, token_id.to(input_ids_ptr.dtype.element_ty), mask=is_token)
    tl.store(positions_ptr + index, position.to(positions_ptr.dtype.element_ty), mask=is_token)
    for table in tl.static_range(NUM_TABLES):
        block = tl.load(tables_ptr + table * stride_tables + place, mask=inside, other=-1).to(tl.int64)
        mapping = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping_ptr + table * stride_mapping + index, mapping, mask=is_token)


def prepare_inputs(
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    block_size: int,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """Fill the model inputs of one pass; see `prepare_inputs_reference`."""
    num_rows, num_tokens = slots.shape[0], input_ids.shape[0]
    assert tokens.stride(1) == 1
    assert block_tables.stride(-1) == 1
    assert query_start.shape == (num_rows + 1,)
    assert starts.shape == context_lens.shape == (num_rows,)
    tables = block_tables if block_tables.dim() == 3 else block_tables.unsqueeze(0)
    mappings = slot_mapping if slot_mapping.dim() == 2 else slot_mapping.unsqueeze(0)
    assert positions.shape == (num_tokens,)
    assert mappings.shape == (len(tables), num_tokens)
    assert mappings.stride(1) == 1 or num_tokens == 1
    assert slot_mapping.dtype == torch.int64
    for vector in (slots, starts, query_start, input_ids, positions, context_lens):
        assert vector.is_contiguous()
    if num_rows == 0:
        return
    block = 128
    _prepare_inputs_kernel[(-(-max(num_rows, num_tokens) // block),)](
        tokens,
        block_tables,
        slots,
        starts,
        query_start,
        input_ids,
        positions,
        slot_mapping,
        context_lens,
        tokens.stride(0),
        tables.stride(1),
        num_rows,
        num_tokens,
        tables.stride(0),
        mappings.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        NUM_TABLES=len(tables),
        num_warps=4,
        **pdl(tokens.device),
    )


@triton.jit(do_not_specialize=["num_rows", "tokens_ptr", "slots_ptr", "positions_ptr", "sampled_ptr"])
def _store_sampled_kernel(
    tokens_ptr,  # [S, L] int32
    slots_ptr,  # [R]
    positions_ptr,  # [R], -1: store nothing
    sampled_ptr,  # [R]
    stride_tokens,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=-1)
    stored = (row < num_rows) & (position >= 0)
    slot = tl.load(slots_ptr + row, mask=stored, other=0).to(tl.int64)
    token = tl.load(sampled_ptr + row, mask=stored, other=0)
    tl.store(tokens_ptr + slot * stride_tokens + position, token.to(tokens_ptr.dtype.element_ty), mask=stored)


def store_sampled(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor) -> None:
    """tokens[slots[r], positions[r]] = sampled[r] where positions[r] >= 0. tokens [S, L] int32, others [R]."""
    num_rows = slots.shape[0]
    assert tokens.stride(1) == 1
    assert positions.shape == sampled.shape == (num_rows,)
    assert slots.is_contiguous()
    assert positions.is_contiguous()
    assert sampled.is_contiguous()
    if num_rows:
        block = 128
        _store_sampled_kernel[(-(-num_rows // block),)](
            tokens, slots, positions, sampled, tokens.stride(0), num_rows, BLOCK=block, num_warps=4,
            **pdl(tokens.device),
        )  # fmt: skip
