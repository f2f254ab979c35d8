"""Sums over ranks, alone or with the residual and the norm behind them.

Every rank adds up in float32, in the order of ranks, whatever the form: results are equal bit by bit between ranks and
between forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.pdl import pdl
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.exchange.choice import Choice, choice_for
from pagebus.kernels.exchange.one_shot import _one_shot_kernel
from pagebus.kernels.exchange.peers import PUSH, SIGNAL, TWO_SHOT, Layout, Peers
from pagebus.kernels.exchange.two_shot import _two_shot_kernel
from pagebus.kernels.layers.norm import add_rms_norm_reference

WHOLE = 7
"""All phases of a call at once, as on GPUs."""


def all_reduce_reference(xs: list[torch.Tensor]) -> torch.Tensor:
    """The sum of x [...] of all ranks, in their order, in float32, rounded to x's format."""
    total = xs[0].to(torch.float32, copy=True)
    for x in xs[1:]:
        total += x
    return total.to(xs[0].dtype)


def all_reduce_norm_reference(
    xs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> torch.Tensor:
    """residual [T, D] += sum of x over ranks * scale (in place), then its RMS norm with ``weight`` [D]. Each x is
    [T, D], or float32 [S, T, D] whose sum over S, rounded to the residual's format, is that rank's part."""
    parts = [x if x.dim() == 2 else x.sum(0).to(residual.dtype) for x in xs]
    normed = add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps, scale)
    assert isinstance(normed, torch.Tensor)
    return normed


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one call adds up: x [parts, rows, columns] without gaps in a part, the last row perhaps short."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    out: torch.Tensor
    eps: float
    factor: float
    parts: int
    stride_part: int
    columns: int


def _fits(rows: _Rows, choice: Choice, layout: Layout) -> bool:
    num_bytes = rows.out.numel() * rows.out.element_size()
    if choice.form != "two_shot":
        return num_bytes <= int(getattr(layout.limits, choice.form))
    num_rows = -(-rows.out.numel() // rows.columns)
    share = -(-num_rows // layout.world)
    return share * rows.columns * rows.out.element_size() <= layout.inbox.slot


def _launch(rows: _Rows, peers: Peers, choice: Choice, phases: int) -> None:
    """Queue one call on the current stream."""
    numel, layout = rows.out.numel(), peers.layout
    num_rows = -(-numel // rows.columns)
    share = -(-num_rows // peers.world)
    block = next_power_of_2(max(rows.columns, 128))
    common = {
        "WORLD": peers.world, "SIZE": rows.columns, "BLOCK": block, "PARTS": rows.parts,
        "SCALED": rows.factor != 1.0, "num_warps": max(4, min(choice.warps, block // 128)), **pdl(rows.out.device),
    }  # fmt: skip
    tensors = rows.x, rows.residual, rows.weight, rows.out, peers.table, peers.state, rows.stride_part
    strides = *tensors, 0 if rows.residual is None else rows.residual.stride(0)
    assert _fits(rows, choice, layout)
    if choice.form == "two_shot":
        tile = max(1, choice.tile // block)
        blocks = min(choice.blocks, peers.max_blocks, -(-share // tile))
        turns = min(choice.turns, -(-share // (blocks * tile)))
        _two_shot_kernel[(blocks,)](
            *strides, peers.rank, numel, num_rows, share, turns, rows.eps, rows.factor, peers.patience_ns,
            INBOX=layout.inbox.start, SLOT=layout.inbox.slot, OUTBOX=layout.outbox.start, TILE=tile,
            FLAGS=layout.two_shot_flags.start, FORM=TWO_SHOT, PHASES=phases, **common,
        )  # fmt: skip
        return
    holes = choice.form == "push"
    area = layout.push if holes else layout.signal
    _one_shot_kernel[(min(choice.blocks, peers.max_blocks, num_rows),)](
        *strides, peers.rank, numel, num_rows, rows.eps, rows.factor, peers.patience_ns,
        START=area.start, SLOT=area.slot, FLAGS=layout.signal_flags.start, FORM=PUSH if holes else SIGNAL, HOLES=holes,
        WIDE=rows.out.element_size() == 4, PHASES=phases & 3, **common,
    )  # fmt: skip


def all_reduce(
    x: torch.Tensor, peers: Peers, choice: Choice | None = None, out: torch.Tensor | None = None, phases: int = WHOLE
) -> torch.Tensor:
    """The sum of x [...] over all ranks, as `all_reduce_reference`, in ``out`` (which may be x). Formats: float32,
    float16, bfloat16. ``choice`` stands in for the table's. ``phases``: of the kernel, for tests."""
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    assert out.is_contiguous()
    if x.numel() == 0:
        return out
    chosen = choice or choice_for(x.numel() * x.element_size(), peers.world, peers.layout.limits, norm=False)
    most = getattr(peers.layout.limits, chosen.form) // x.element_size() // chosen.columns * chosen.columns
    flat, target = x.view(-1), out.view(-1)
    for start in range(0, x.numel(), most):
        piece, into = flat[start : start + most], target[start : start + most]
        _launch(_Rows(piece, None, None, into, 0.0, 1.0, 1, 0, chosen.columns), peers, chosen, phases)
    return out


def all_reduce_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: Peers, scale: float = 1.0,
    choice: Choice | None = None, out: torch.Tensor | None = None, phases: int = WHOLE,
) -> torch.Tensor:  # fmt: skip
    """As `all_reduce_norm_reference`: x [T, D], or float32 [S, T, D], of this rank. ``weight`` is in the residual's
    format or in float32. Returns [T, D]. ``choice``, ``out`` and ``phases`` as of `all_reduce`."""
    parts, (num_rows, columns) = (1 if x.dim() == 2 else x.shape[0]), residual.shape
    assert x.shape[-2:] == residual.shape
    assert residual.stride(1) == 1
    assert weight.shape == (columns,)
    assert weight.dtype in (residual.dtype, torch.float32)
    assert x.dtype == (torch.float32 if x.dim() == 3 else residual.dtype)
    x = x.contiguous()
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device) if out is None else out
    assert out.is_contiguous()
    row_bytes = columns * residual.element_size()
    chosen = choice or choice_for(num_rows * row_bytes, peers.world, peers.layout.limits, norm=True)
    most = getattr(peers.layout.limits, chosen.form) // row_bytes
    stride_part = 0 if x.dim() == 2 else x.stride(0)
    for start in range(0, num_rows, most):
        rows = slice(start, start + most)
        piece = _Rows(
            x[..., rows, :], residual[rows], weight, out[rows], eps, scale, parts, stride_part, columns
        )  # fmt: skip
        _launch(piece, peers, chosen, phases)
    return out
