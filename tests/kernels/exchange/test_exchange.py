"""Sums and gathering over ranks: indexes, arithmetic and the turns of buffers, with all ranks in one memory.

What ranks signal to each other is compiled in ``test_compile.py`` and runs on GPUs in ``tests/gpu/ranks``.
"""

from __future__ import annotations

import random

import pytest
import torch

from pagebus.kernels.exchange.all_reduce import (
    all_reduce,
    all_reduce_norm,
    all_reduce_norm_reference,
    all_reduce_reference,
)
from pagebus.kernels.exchange.choice import Choice, choice_for, choices
from pagebus.kernels.exchange.gather import gather, gather_reference
from pagebus.kernels.exchange.gather_rows import gather_rows, gather_rows_reference
from pagebus.kernels.exchange.peers import FORMS, HOLE, Layout, Limits
from tests.kernels.exchange.virtual_ranks import SMALL, VirtualRanks

PARTS = {"push": (1, 2), "signal": (1, 2), "two_shot": (1, 2, 4), "turns": (1, 2, 4)}
"""Of each form, with one more: ``two_shot`` in turns, and with several rows at a time."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEP = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 2**-7}
"""What the interpreter's rounding may differ by: it cuts bfloat16 off."""
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="parts of kernels run alone only in the interpreter")


def choice(form: str, columns: int = 128, blocks: int = 3) -> Choice:
    if form == "turns":
        return Choice(1 << 30, "two_shot", min(blocks, 2), 4, columns, 2 * columns, 4)
    return Choice(1 << 30, form, blocks, 4, columns)


def sums(ranks: VirtualRanks, xs: list[torch.Tensor], form: str, columns: int = 128) -> list[torch.Tensor]:
    outs = [torch.full_like(x, 7) for x in xs]
    for phases in PARTS[form]:
        for peers, x, out in zip(ranks.peers, xs, outs, strict=True):
            all_reduce(x, peers, choice(form, columns), out, phases)
    return outs


def check(outs: list[torch.Tensor], xs: list[torch.Tensor]) -> None:
    """Equal bit by bit between ranks, and the reference's."""
    expected = all_reduce_reference(xs)
    for out in outs:
        assert torch.equal(out, outs[0])
        torch.testing.assert_close(out, expected, rtol=STEP[out.dtype], atol=STEP[out.dtype])


def holes_left(ranks: VirtualRanks) -> bool:
    layout = ranks.layout
    area = slice(layout.push.start // 4, layout.signal.start // 4)
    return all(bool((region.view(torch.int32)[area] == HOLE).all()) for region in ranks.regions)


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_sum(form: str, world: int, device: torch.device) -> None:
    ranks = VirtualRanks(world, device)
    for turn, numel in enumerate((1, 130, 5003 if PARTS[form] == (1, 2, 4) else 1001, 7)):
        dtype = DTYPES[turn % 3]
        xs = [torch.randn(numel).to(dtype) for _ in range(world)]
        xs[0][0] = xs[1][0] = -0.0
        outs = sums(ranks, xs, form)
        check(outs, xs)
    assert holes_left(ranks)
    assert not ranks.notes.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_holes_in_data(dtype: torch.dtype, device: torch.device) -> None:
    """Values that look like holes arrive as zeros."""
    ranks = VirtualRanks(2, device)
    hole = torch.full((128,), HOLE, dtype=torch.int32).view(dtype)[:128].clone()
    outs = sums(ranks, [hole, hole.clone()], "push")
    assert all(torch.equal(out, torch.zeros_like(out)) for out in outs)
    assert holes_left(ranks)


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """With one or several sums of a rank, a strided residual, a scale, and weights of both formats."""
    world = 3
    ranks = VirtualRanks(world, device)
    for rows, columns, parts, scale, wide in ((1, 96, 1, 1.0, False), (5, 160, 1, 0.5, True), (7, 96, 3, 1.0, False)):
        shape = (rows, columns) if parts == 1 else (parts, rows, columns)
        xs = [torch.randn(shape).to(dtype if parts == 1 else torch.float32) for _ in range(world)]
        weight = torch.randn(columns).to(torch.float32 if wide else dtype)
        base = torch.randn(rows, columns + 8).to(dtype)
        residuals = [base.clone()[:, :columns] for _ in range(world)]
        outs = [torch.empty(rows, columns, dtype=dtype) for _ in range(world)]
        for phases in PARTS[form]:
            for peers, x, residual, out in zip(ranks.peers, xs, residuals, outs, strict=True):
                all_reduce_norm(x, residual, weight, 1e-5, peers, scale, choice(form), out, phases)
        expected_residual = base.clone()[:, :columns]
        expected = all_reduce_norm_reference(xs, expected_residual, weight, 1e-5, scale)
        for residual, out in zip(residuals, outs, strict=True):
            assert torch.equal(residual, residuals[0])
            assert torch.equal(out, outs[0])
            step = 4 * STEP[dtype] + (1e-6 if parts == 3 else 0)
            torch.testing.assert_close(residual, expected_residual, rtol=step, atol=step)
            tolerance = max(step, 2e-3 if dtype == torch.float16 else 2e-5)
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert holes_left(ranks)


def test_forms_are_equal_bit_by_bit(device: torch.device) -> None:
    ranks = VirtualRanks(3, device)
    xs = [torch.randn(777).bfloat16() for _ in range(3)]
    first, *others = (sums(ranks, xs, form)[0] for form in PARTS)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bfloat16, torch.int64])
def test_gather(dtype: torch.dtype, device: torch.device) -> None:
    """Few words and many, of any format, also such as would be holes."""
    ranks = VirtualRanks(3, device)
    for shape in ((1,), (5, 3), (700,), (2, 500)):
        xs = [torch.randint(0, 200, shape).to(dtype) - 100 * (dtype != torch.uint8) for _ in range(3)]
        outs: list[torch.Tensor] = []
        for phases in (1, 2):
            if phases == 2:  # what the first half left in its own result is not kept
                for rank in range(3):
                    told = gather(xs[rank], ranks.peers[rank], phases)
                    others = [other for other in range(3) if other != rank]
                    assert torch.equal(told[others], gather_reference(xs)[others])
            else:
                outs = [gather(x, peers, phases) for x, peers in zip(xs, ranks.peers, strict=True)]
        assert all(torch.equal(out[rank], xs[rank]) for rank, out in enumerate(outs))


def test_gather_rows(device: torch.device) -> None:
    """Some rows of parts of uneven widths; the others are left alone."""
    ranks, wanted = VirtualRanks(3, device), torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    widths = [1166, 1167, 1167]
    for _ in range(3):
        xs = [torch.randn(3, width + 3, device=device)[:, :width] for width in widths]
        whole, told = gather_rows_reference(xs, wanted), {}
        for phases in (1, 2):
            told[phases] = [
                gather_rows(x, wanted, widths, peers, phases).split(widths, 1)
                for x, peers in zip(xs, ranks.peers, strict=True)
            ]
        for rank in range(3):
            for other, expected in enumerate(whole.split(widths, 1)):
                found = told[1 if other == rank else 2][rank][other]
                assert torch.equal(found[1:], expected[1:])


def test_random_turns(device: torch.device) -> None:
    """All forms, sizes and grids in any order: whatever a call leaves behind does the next no harm."""
    draw, ranks = random.Random(5), VirtualRanks(2, device)
    for _ in range(24):
        form, numel, dtype = draw.choice(list(PARTS)), draw.randint(1, 1500), draw.choice(DTYPES)
        numel = min(numel, SMALL.push // dtype.itemsize)
        xs = [torch.randn(numel).to(dtype) for _ in range(2)]
        check(sums(ranks, xs, form, draw.choice((64, 128, 256))), xs)
    assert holes_left(ranks)


def test_table() -> None:
    """Rows grow, name forms, and fit the areas of a default layout; larger sums take the last."""
    for world in range(2, 9):
        limits = Layout(world).limits
        for norm in (False, True):
            rows = choices(world, norm)
            assert [row.up_to for row in rows] == sorted({row.up_to for row in rows})
            for row in rows:
                assert row.form in FORMS
                assert row.up_to <= getattr(limits, row.form)
                assert 1 <= row.blocks <= 128
                assert choice_for(row.up_to, world, limits, norm=norm) == row
            assert choice_for(1 << 30, world, limits, norm=norm) == rows[-1]
            assert choice_for(rows[0].up_to, world, Limits(push=64), norm=norm) != rows[0]
