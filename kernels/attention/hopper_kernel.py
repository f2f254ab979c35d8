"""Attention of long prompts on Hopper GPUs, in Gluon, after FlashAttention-3 (arXiv 2407.08608).

A program has three parts. One warp copies keys and values, tile by tile, into a ring of buffers in shared memory (TMA,
guarded by mbarriers). Two warpgroups compute 64 queries each: they compute the scores of a tile, and overlap its
softmax with the product of the previous weights and their values. They take turns in issuing products, so that the
softmax of one overlaps the products of the other. Programs are persistent, one per multiprocessor. The first keys of
the next piece of work arrive while the last results are still being written.

Heads of up to 128 have tiles of 128 keys, larger ones of 64: a warpgroup's results then take 128 registers of each
thread, and its scores 32. Tiles before a sliding window are left out; those that it cuts are masked, like those at the
block's end. Heads whose size is no power of two are padded in shared memory.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper, next_power_of_2

LOG2_E = 1.4426950408889634
ROWS = 64
"""Queries of a warpgroup."""
SPAN_FIELDS = 8
MOST_CAP = 64.0
"""Up to this soft cap scores need no maximum: exp(64) < 2^93, and a million of those, times values, are in float32."""
STAGES = {64: 3, 128: 3, 256: 2}
"""Tiles in shared memory, of keys and of values, by the padded head's size."""
REGISTERS, COPY_REGISTERS = 240, 24
"""Of a thread that computes, and of one that copies; the first warpgroup gets what the others leave, as many."""


@gluon.jit
def _work(spans, index, num_spans, Q_HEADS: gl.constexpr, SPAN_FIELDS: gl.constexpr):
    """The index-th piece of work of this program: whether there is one, where its span is, and its head. Every other
    time programs take work in the opposite order, so that none has always the longest."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = index * programs + gl.where(index % 2 == 0, program, programs - 1 - program)
    return place < num_spans * Q_HEADS, spans + place // Q_HEADS * SPAN_FIELDS, place % Q_HEADS


@gluon.jit
def _queries(exists, span):
    """Of a span what a warpgroup needs at once: position of its first token, its first tile, and the one behind the
    last."""
    return (
        gl.load(span + 3, mask=exists, other=0),
        gl.load(span + 4, mask=exists, other=0),
        gl.load(span + 5, mask=exists, other=0),
    )


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, spans, num_spans, rounds,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, ROWS: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, SPAN_FIELDS: gl.constexpr,
):  # fmt: skip
    """The warp that copies: as many tiles ahead as there are buffers."""
    count = 0
    for index in range(rounds):
        exists, span, head = _work(spans, index, num_spans, Q_HEADS, SPAN_FIELDS)
        token = gl.load(span, mask=exists, other=0)
        key = gl.load(span + 2, mask=exists, other=0)
        begin = gl.load(span + 4, mask=exists, other=0)
        end = gl.load(span + 5, mask=exists, other=0)
        column = head // GROUP * BLOCK_DIM
        for tile in range(begin, end):
            stage, phase = count % STAGES, (count // STAGES) & 1
            row = key + tile * TILE
            hopper.mbarrier.wait(k_empty.index(stage), phase ^ 1)
            hopper.mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(k_desc, [row, column], k_ready.index(stage), k_smem.index(stage))
            if tile == begin:  # behind the first keys, which need not wait for the queries before
                for part in gl.static_range(2):
                    hopper.mbarrier.wait(q_empty.index(part), (index & 1) ^ 1)
                    hopper.mbarrier.expect(q_ready.index(part), q_desc.block_type.nbytes)
                    hopper.tma.async_copy_global_to_shared(
                        q_desc, [token + part * ROWS, head * HEAD_DIM], q_ready.index(part), q_smem.index(part)
                    )
            hopper.mbarrier.wait(v_empty.index(stage), phase ^ 1)
            hopper.mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(v_desc, [row, column], v_ready.index(stage), v_smem.index(stage))
            count += 1


@gluon.jit
def _wait_for_turn(PART: gl.constexpr):
    """Until the other warpgroup has given it. Named barriers of all 256 threads: 10 for the first's turn, 11 for the
    second's."""
    if PART == 0:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 11, 256; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _give_turn(PART: gl.constexpr):
    if PART == 0:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _capped(scores, scale_log2, SOFTCAP: gl.constexpr):
    """Scores times scale_log2; with a soft cap c, c tanh(s / c) for each s, times log2(e)."""
    if SOFTCAP > 0:
        CAP: gl.constexpr = SOFTCAP * 1.4426950408889634
        ratio = scores * (scale_log2 * (0.6931471805599453 / SOFTCAP))
        # One instruction, right to 11 bits; queries and keys have 8 or 11.
        scores = CAP * gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [ratio], gl.float32, True, 1)
    return scores


@gluon.jit
def _hide(scores, tile, position, window, TILE: gl.constexpr, WINDOWED: gl.constexpr):
    """Scores of the keys that a query sees; of others, minus infinity."""
    place = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
    seen = place[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (place[None, :] > (position - window)[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _base(highest, GUARDED: gl.constexpr):
    """What is subtracted from scores; 0 where a query has seen nothing yet."""
    if GUARDED:
        highest = gl.where(highest == float("-inf"), 0.0, highest)
    return highest


@gluon.jit
def _attend(
    q, acc, weights, decay, highest, total, count, begin, end, last, position, window, scale_log2,
    k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, BOUNDED: gl.constexpr, PART: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, P_LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Take the tiles begin..end of keys, of which the first has come, and the values of the tiles before them."""
    factor = scale_log2
    if SOFTCAP > 0:
        factor = 1.0
    for tile in range(begin, end):
        stage, before = count % STAGES, (count - 1) % STAGES
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        if not BOUNDED:
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
        hopper.mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
        _wait_for_turn(PART)
        # The scores take the registers of the weights.
        later = hopper.warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), weights, use_acc=False, is_async=True)
        acc_later = hopper.warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        _give_turn(PART)
        scores = hopper.warpgroup_mma_wait(1, deps=[later])
        hopper.mbarrier.arrive(k_empty.index(stage), count=1)
        scores = _capped(scores, scale_log2, SOFTCAP)
        if MASKED:
            scores = _hide(scores, tile, position, window, TILE, WINDOWED)
        if not BOUNDED:
            new_highest = gl.maximum(highest, gl.max(scores, axis=1) * factor)
            base = _base(new_highest, MASKED and WINDOWED)
            scores = scores * factor - base[:, None]
            decay = gl.exp2(highest - base)
            total = total * decay
            highest = new_highest
        weights = gl.exp2(scores)
        total += gl.sum(weights, axis=1)
        count += 1
        # Its branch keeps the assembler from moving the exponentials behind the wait for the product beside them.
        hopper.mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1, pred=tile + 1 < last)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc_later])
        hopper.mbarrier.arrive(v_empty.index(before), count=1)
    return acc, weights, decay, highest, total, count


@gluon.jit
def _compute(
    out_ptr, partial_ptr, lse_ptr, sinks_ptr, spans, num_spans, rounds, scale_log2, window, stride_ot,
    q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    PART: gl.constexpr, Q_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, ROWS: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, SPAN_FIELDS: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
    BOUNDED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that compute."""
    dtype: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    factor = scale_log2
    if SOFTCAP > 0:
        factor = 1.0
    q = q_smem.index(PART)
    if PART == 1:
        _give_turn(1)
    count = 0
    exists, span, head = _work(spans, 0, num_spans, Q_HEADS, SPAN_FIELDS)
    first, begin, end = _queries(exists, span)
    for index in range(rounds):
        if exists:
            position = first + PART * ROWS + gl.arange(0, ROWS, S_ROWS)
            stage = count % STAGES
            hopper.mbarrier.wait(q_ready.index(PART), index & 1)
            hopper.mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
            _wait_for_turn(PART)
            zeros = gl.zeros([ROWS, TILE], gl.float32, S_LAYOUT)
            later = hopper.warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            _give_turn(PART)
            scores = hopper.warpgroup_mma_wait(0, deps=[later])
            hopper.mbarrier.arrive(k_empty.index(stage), count=1)
            scores = _hide(_capped(scores, scale_log2, SOFTCAP), begin, position, window, TILE, WINDOWED)
            highest = gl.zeros([ROWS], gl.float32, S_ROWS) if BOUNDED else gl.max(scores, axis=1) * factor
            base = _base(highest, WINDOWED and not BOUNDED)
            weights = gl.exp2(scores * factor - base[:, None])
            total = gl.sum(weights, axis=1)
            decay = gl.full([ROWS], 1.0, gl.float32, S_ROWS)
            acc = gl.zeros([ROWS, BLOCK_DIM], gl.float32, O_LAYOUT)
            count += 1
            hopper.mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1, pred=begin + 1 < end)
            inner = begin + 1
            if WINDOWED:  # from here on all queries see every first key of a tile
                low = (gl.maximum(first + 2 * ROWS - window, 0) + TILE - 1) // TILE
                inner = gl.maximum(gl.minimum(low, end), begin + 1)
                acc, weights, decay, highest, total, count = _attend(
                    q, acc, weights, decay, highest, total, count, begin + 1, inner, end, position, window, scale_log2,
                    k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
                    True, WINDOWED, SOFTCAP, BOUNDED, PART, TILE, STAGES, P_LAYOUT, dtype,
                )  # fmt: skip
            masked = gl.maximum(gl.minimum((first + 1) // TILE, end), inner)  # all queries see every key before
            acc, weights, decay, highest, total, count = _attend(
                q, acc, weights, decay, highest, total, count, inner, masked, end, position, window, scale_log2,
                k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
                False, WINDOWED, SOFTCAP, BOUNDED, PART, TILE, STAGES, P_LAYOUT, dtype,
            )  # fmt: skip
            acc, weights, decay, highest, total, count = _attend(
                q, acc, weights, decay, highest, total, count, masked, end, end, position, window, scale_log2,
                k_smem, v_smem, k_ready, k_empty, v_ready, v_empty,
                True, WINDOWED, SOFTCAP, BOUNDED, PART, TILE, STAGES, P_LAYOUT, dtype,
            )  # fmt: skip
            hopper.mbarrier.arrive(q_empty.index(PART), count=1)
            token, members = gl.load(span), gl.load(span + 1)
            piece, pieces = gl.load(span + 6), gl.load(span + 7)
            last_head = head
            exists, span, head = _work(spans, index + 1, num_spans, Q_HEADS, SPAN_FIELDS)
            first, begin, end = _queries(exists, span)
            stage = (count - 1) % STAGES
            if not BOUNDED:
                acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
            p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
            hopper.mbarrier.wait(v_ready.index(stage), ((count - 1) // STAGES) & 1)
            acc = hopper.warpgroup_mma_wait(0, deps=[hopper.warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)])
            hopper.mbarrier.arrive(v_empty.index(stage), count=1)

            if WINDOWED:  # rows behind the block's last query may have seen nothing
                total = gl.where(total > 0, total, 1.0)
            whole = total
            if SINKS:  # of pieces, the merge adds it
                share = gl.exp2(gl.load(sinks_ptr + last_head) * 1.4426950408889634 - highest)
                whole = total + gl.where(piece < 0, share, 0.0)
            acc = acc * gl.convert_layout(1 / whole, O_ROWS)[:, None]
            member = gl.arange(0, ROWS, O_ROWS)
            dim = gl.arange(0, BLOCK_DIM, gl.SliceLayout(0, O_LAYOUT))[None, :]
            exist = (PART * ROWS + member < members)[:, None]
            if HEAD_DIM < BLOCK_DIM:
                exist = exist & (dim < HEAD_DIM)
            if piece >= 0:
                part = ((piece + PART * pieces) * ROWS + gl.arange(0, ROWS, S_ROWS)) * Q_HEADS + last_head
                gl.store(lse_ptr + part, highest + gl.log2(total))
                part = gl.convert_layout(part, O_ROWS).to(gl.int64) * HEAD_DIM
                gl.store(partial_ptr + part[:, None] + dim, acc, mask=exist)
            else:
                out = (token + PART * ROWS + member).to(gl.int64) * stride_ot + last_head * HEAD_DIM
                gl.store(out_ptr + out[:, None] + dim, acc.to(dtype), mask=exist)
    if PART == 0:
        _wait_for_turn(0)  # which the other gave last


@gluon.jit(do_not_specialize=["num_spans", "rounds", "window"])
def _attention_kernel(
    q_desc,  # [T, Hq * D]
    k_desc,  # [N, Hkv * BLOCK_DIM]
    v_desc,  # [N, Hkv * BLOCK_DIM]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [P, ROWS, Hq, D] float32: normalised results of pieces
    lse_ptr,  # [P, ROWS, Hq] float32: log2 of their sums of exponentials
    sinks_ptr,  # [Hq] float32, if SINKS
    spans,  # [num_spans, SPAN_FIELDS] int32, see `launch_hopper_attention`
    num_spans,
    rounds,
    scale_log2,
    window,
    stride_ot,
    Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN_FIELDS: gl.constexpr,
    WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr,  # 0: none
    BOUNDED: gl.constexpr,  # scores, which then need no maximum
    SINKS: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_DIM], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        hopper.mbarrier.init(q_ready.index(i), count=1)
        hopper.mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_ready.index(i), count=1)
        hopper.mbarrier.init(v_ready.index(i), count=1)
        hopper.mbarrier.init(k_empty.index(i), count=2)
        hopper.mbarrier.init(v_empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (_compute, (
            out_ptr, partial_ptr, lse_ptr, sinks_ptr, spans, num_spans, rounds, scale_log2, window, stride_ot,
            q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
            0, Q_HEADS, HEAD_DIM, BLOCK_DIM, ROWS, TILE, STAGES, SPAN_FIELDS, WINDOWED, SOFTCAP, BOUNDED, SINKS,
        )),
        (_compute, (
            out_ptr, partial_ptr, lse_ptr, sinks_ptr, spans, num_spans, rounds, scale_log2, window, stride_ot,
            q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
            1, Q_HEADS, HEAD_DIM, BLOCK_DIM, ROWS, TILE, STAGES, SPAN_FIELDS, WINDOWED, SOFTCAP, BOUNDED, SINKS,
        )),
        (_copy, (
            q_desc, k_desc, v_desc, spans, num_spans, rounds,
            q_smem, k_smem, v_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
            Q_HEADS, GROUP, HEAD_DIM, BLOCK_DIM, ROWS, TILE, STAGES, SPAN_FIELDS,
        )),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def tile_of(head_dim: int) -> int:
    """Keys of a tile: as many as fit into registers as scores, beside a block's results, and into shared memory."""
    return 128 if head_dim <= 128 else 64


def launch_hopper_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    programs: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """out = causal attention of the queries in ``spans`` of q, both [T, Hq, D]; all others stay.

    k and v [N, Hkv, B], with any stride of tokens, B being D rounded up to a power of two: each row's keys begin at a
    multiple of `tile_of` D, and zeros follow them up to the next. Behind D numbers of a padded key or value there are
    zeros. ``spans`` [M, SPAN_FIELDS] int32, those of the most keys first: first token and number of tokens (up to 2
    ROWS), where the row's first key would be in k, position of the first token in its row, the first tile of keys
    (without a window the first token sees its first key) and the one after the last, the piece and the number of
    pieces of its block. Results of pieces go to ``partial`` [P, ROWS, Hq, D] and ``lse`` [P, ROWS, Hq]: of the first
    ROWS tokens as that piece, of the others as many pieces later; each token sees a key of each piece. If the piece is
    -1, they go to out. ``window`` and ``softcap`` (0: none) and ``sinks`` are as in `paged_attention`.
    """
    (q_heads, head_dim), (kv_heads, block_dim) = q.shape[1:], k.shape[1:]
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    assert k.stride()[1:] == v.stride()[1:] == (block_dim, 1)
    assert block_dim == next_power_of_2(head_dim)
    tile = tile_of(head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def rows(of: torch.Tensor, count: int) -> LayoutDescriptor:
        shape = [of.shape[0], of.shape[1] * of.shape[2]]
        return LayoutDescriptor(of, shape, [of.stride(0), 1], [count, block_dim], layout)

    work = len(spans) * q_heads
    grid = min(programs, work)
    _attention_kernel[(grid,)](
        rows(q, ROWS), rows(k, tile), rows(v, tile), out, partial, lse, lse if sinks is None else sinks, spans,
        len(spans), -(-work // grid),
        scale * LOG2_E, window, out.stride(0),
        Q_HEADS=q_heads, GROUP=q_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_DIM=block_dim, ROWS=ROWS, TILE=tile,
        STAGES=STAGES[block_dim], SPAN_FIELDS=SPAN_FIELDS, WINDOWED=window > 0, SOFTCAP=softcap,
        BOUNDED=0 < softcap <= MOST_CAP and q.dtype == torch.bfloat16 and sinks is None,
        SINKS=sinks is not None, REGISTERS=REGISTERS, COPY_REGISTERS=COPY_REGISTERS, num_warps=4,
    )  # fmt: skip
