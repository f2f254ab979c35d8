"""Gathering of what all ranks have: few words beside the number of their call, many behind a signal."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.exchange.peers import GATHER, SIGNAL, Peers
from pagebus.kernels.exchange.waiting import (
    begin_call,
    end_call,
    pointer_to,
    signal_all,
    slot_address,
    wait_all,
    wait_for_words,
)

BLOCK = 256
MOST_BLOCKS = 64
"""Of a grid."""


@triton.jit(do_not_specialize=["rank", "num_words", "patience_ns"])
def _gather_words_kernel(
    x_ptr,  # int32 [num_words]
    out_ptr,  # [WORLD, num_words]
    table_ptr,
    state_ptr,
    rank,
    num_words,
    patience_ns,
    START: tl.constexpr,
    SLOT: tl.constexpr,
    FLAGS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,  # each word lies beside the number of its call
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,  # as of the kernel of one step, in one_shot.py
    PDL: tl.constexpr,
):
    WORD: tl.constexpr = tl.int64 if PAIRS else tl.int32
    block, grid = tl.program_id(0), tl.num_programs(0)
    mine = tl.load(table_ptr + rank)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call, patience = begin_call(state_ptr, block, FORM)
    first_slot = (call & 1) * WORLD
    if PHASES & 1:
        for start in range(block * BLOCK, num_words, grid * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            words = tl.load(x_ptr + offsets, mask=offsets < num_words, other=0)
            tl.store(out_ptr + tl.cast(rank, tl.int64) * num_words + offsets, words, mask=offsets < num_words)
            if PAIRS:
                words = (words.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
            for step in tl.static_range(1, WORLD):
                slot = slot_address(table_ptr, (rank + step) % WORLD, first_slot + rank, START, SLOT)
                tl.store(pointer_to(slot, WORD) + offsets, words, mask=offsets < num_words)
        if not PAIRS and PHASES == 3:
            signal_all(table_ptr, rank, block, call, FLAGS, WORLD)
    if PHASES & 2:
        if not PAIRS and PHASES == 3:
            patience = wait_all(table_ptr, state_ptr, rank, block, call, patience, patience_ns, FLAGS, FORM, WORLD)
        for start in range(block * BLOCK, num_words, grid * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < num_words
            for step in tl.static_range(1, WORLD):
                sender = (rank + step) % WORLD
                pointers = pointer_to(mine + START + tl.cast(first_slot + sender, tl.int64) * SLOT, WORD) + offsets
                if PAIRS:
                    words, patience = wait_for_words(
                        pointers, mask, table_ptr, state_ptr, sender, call, block, patience, patience_ns, FORM, WORLD
                    )
                else:
                    words = tl.load(pointers, mask=mask, other=0, cache_modifier=".cg")
                tl.store(out_ptr + tl.cast(sender, tl.int64) * num_words + offsets, words, mask=mask)
        end_call(state_ptr, call, block, grid, FORM)


def gather_reference(xs: list[torch.Tensor]) -> torch.Tensor:
    """x [...] of each rank, in their order: [N, ...]."""
    return torch.stack(xs)


def _gather_piece(words: torch.Tensor, out: torch.Tensor, peers: Peers, phases: int) -> None:
    layout, count = peers.layout, len(words)
    pairs = 4 * count <= layout.limits.gather
    area = layout.gather if pairs else layout.signal
    _gather_words_kernel[(min(MOST_BLOCKS, peers.max_blocks, -(-count // BLOCK)),)](
        words, out, peers.table, peers.state, peers.rank, count, peers.patience_ns,
        START=area.start, SLOT=area.slot, FLAGS=layout.signal_flags.start, FORM=GATHER if pairs else SIGNAL,
        PAIRS=pairs, WORLD=peers.world, BLOCK=BLOCK, PHASES=phases, num_warps=8, **pdl(words.device),
    )  # fmt: skip


def gather(x: torch.Tensor, peers: Peers, phases: int = 3) -> torch.Tensor:
    """x [...], of any format, of all ranks in their order: [N, ...]. What is beyond the limits goes in pieces."""
    if x.numel() == 0:
        return x.new_empty((peers.world, *x.shape))
    flat = x.contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % 4
    words = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(torch.int32)
    most = peers.layout.limits.signal // 4
    if len(words) <= most:
        out = torch.empty((peers.world, len(words)), dtype=torch.int32, device=x.device)
        _gather_piece(words, out, peers, phases)
    else:
        assert phases == 3
        parts = []
        for piece in words.split(most):
            part = torch.empty((peers.world, len(piece)), dtype=torch.int32, device=x.device)
            _gather_piece(piece, part, peers, phases)
            parts.append(part)
        out = torch.cat(parts, dim=1)
    told = out.view(torch.uint8)[:, : len(flat)]
    return (told.contiguous() if missing else told).view(x.dtype).view(peers.world, *x.shape)
