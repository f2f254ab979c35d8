"""Attention over latents: decodes and prompts, absorbed, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention.paged_attention import (
    Spans,
    cut_prompts,
    cut_prompts_invariant,
    plan_attention,
    plan_attention_invariant,
)
from pagebus.kernels.latent.attention import latent_attention, latent_attention_invariant
from pagebus.kernels.latent.reference import latent_attention_reference
from pagebus.kernels.latent.shape import LatentShape
from tests.kernels.latent.latent_cases import LatentCase, make_latents

pytestmark = pytest.mark.share(6)

SIZES: list[dict[str, Any]] = [
    {"heads": 4, "rank": 32, "nope": 16, "rope": 16, "value": 16},
    {"heads": 5, "rank": 40, "nope": 24, "rope": 12, "value": 20, "block_size": 8},
    {"heads": 20, "rank": 64, "nope": 16, "rope": 8, "value": 32, "block_size": 32},
]
ROWS = [
    ([1, 17, 64, 0, 300], [1, 1, 1, 1, 1]),
    ([24, 33, 70], [24, 5, 1]),
    ([90, 7, 40, 37], [1, 1, 20, 3]),
]


def shape_of(case: LatentCase) -> LatentShape:
    rank = case.expansion.shape[2]
    return LatentShape(case.q.shape[1], 1, rank, case.q.element_size(), rope_dim=case.cache.shape[2] - rank)


def by_kernel(case: LatentCase, q: torch.Tensor | None = None, *, invariant: bool = False) -> torch.Tensor:
    """The kernels' attended latents, of other absorbed queries if these are given, from a plan of their own."""
    q = case.absorbed if q is None else q
    rows, shape, device = case.rows, shape_of(case), case.q.device
    count = rows["num_decodes"]
    lens = rows["query_start"].cpu().numpy(), rows["context_lens"].cpu().numpy()
    cut = (cut_prompts_invariant if invariant else cut_prompts)(*lens, count, shape, device)
    spans = Spans.copied(cut, device) if len(cut.spans) else None
    if invariant:
        plan = plan_attention_invariant(rows["slots"], rows["context_lens"], shape, spans)
        return latent_attention_invariant(q, case.q[..., case.nope :], case.cache, **rows, plan=plan)
    decodes = rows["slots"][:count], rows["context_lens"][:count]
    plan = plan_attention(*decodes, shape, spans, settled=False)
    return latent_attention(q, case.q[..., case.nope :], case.cache, **rows, plan=plan)


def live(case: LatentCase) -> list[int]:
    """Tokens of rows with a context."""
    row_of = [row for row, count in enumerate(case.query_lens) for _ in range(count)]
    return [token for token, row in enumerate(row_of) if case.context_lens[row]]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['heads']} heads")
@pytest.mark.parametrize("rows", ROWS, ids=["decodes", "prompts", "both"])
def test_kernels_and_reference_follow_the_definition(
    rows: tuple[list[int], list[int]], sizes: dict[str, Any], device: torch.device
) -> None:
    """Cut rows are merged, unused places are never read, and rows without a context disturb nothing."""
    case = make_latents(*rows, **sizes, device=device)
    expected, tokens = case.attended().float(), live(case)
    reference = latent_attention_reference(case.absorbed, case.q[..., case.nope :], case.cache, **case.rows)
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_kernel(case)[tokens], expected[tokens], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_kernel(case, invariant=True)[tokens], expected[tokens], atol=1e-5, rtol=1e-4)


def test_half_precision(device: torch.device) -> None:
    """Float16, of a shape whose tile holds several queries."""
    case = make_latents([70, 40, 9], [1, 40, 9], **SIZES[0], dtype=torch.float16, device=device)
    got, expected = by_kernel(case).double(), case.attended()
    assert (got - expected).norm() / expected.norm() < 1e-2


def test_a_token_alone_has_the_same_bits(device: torch.device) -> None:
    """Of the kernel for reproducible results: as a decode, and among the others of its chunk."""
    case = make_latents([50], [9], **SIZES[1], device=device)
    whole = by_kernel(case, invariant=True)
    rows = case.rows | {"query_start": case.rows["query_start"].clamp(max=1), "num_decodes": 1}
    single = LatentCase(case.q[8:], case.cache, case.expansion, rows, case.nope, [50], [1])
    assert torch.equal(by_kernel(single, case.absorbed[8:], invariant=True)[0], whole[8])
