"""Long prompts over expanded latents, and the plan that cuts them into pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagebus.kernels.latent.expanded_plan
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.latent.expanded import expanded_attention
from pagebus.kernels.latent.expanded_plan import Sizes, make_pieces, pieces_on, rows_to_expand, scratch_bytes
from pagebus.kernels.latent.reference import expanded_attention_reference
from tests.kernels.latent.latent_cases import make_latents

V2_LITE = Sizes(heads=16, nope=128, rope=64, value=128, rank=512, element_size=2)
ODD: dict[str, Any] = {"heads": 3, "rank": 40, "nope": 24, "rope": 12, "value": 20, "block_size": 8}


def test_rows_are_expanded_from_about_170_tokens_on() -> None:
    """Fewer are cheaper over latents, behind a long past; without one, absorbing costs as much as expanding."""
    few, many = LongRow(0, 0, 150, 20000), LongRow(1, 150, 200, 20000)
    assert rows_to_expand((few, many), V2_LITE) == (many,)
    assert rows_to_expand((LongRow(0, 0, 64, 64), LongRow(1, 64, 63, 63)), V2_LITE) == (LongRow(0, 0, 64, 64),)


@pytest.mark.parametrize("together", [128, 256, 1024])
def test_pieces_hold_every_key_that_a_query_sees_once(together: int) -> None:
    """In order of the keys; a block's softmax begins with its first piece and ends with its last."""
    rows = (LongRow(2, 10, 100, 300), LongRow(3, 110, 500, 500), LongRow(5, 610, 1, 129))
    seen: dict[int, list[tuple[int, int]]] = {}
    for piece in make_pieces(rows, 64, together):
        assert piece.keys == piece.segments[:, 2].sum() <= together
        for first, count, position, base, begin, end, before, after in piece.spans.tolist():
            row = next(each for each in rows if each.tokens.start <= first < each.tokens.stop)
            [segment] = [each for each in piece.segments.tolist() if each[0] == row.row]
            assert base + begin == segment[3]
            assert segment[1] <= begin < end <= segment[1] + segment[2]
            assert position == row.past + first - row.first_token
            keys = seen.setdefault(first, [])
            assert before == (len(keys) > 0)
            assert after == (end < position + count)
            keys.append((begin, end))
    for row in rows:
        for first in range(row.first_token, row.tokens.stop, 64):
            last = row.past + min(first - row.first_token + 64, row.num_queries)
            edges = seen.pop(first)
            assert [edge[0] for edge in edges] == [0, *(edge[1] for edge in edges[:-1])]
            assert edges[-1][1] == last
    assert not seen


@pytest.mark.parametrize("keys", [128, 1 << 20], ids=["pieces", "one piece"])
def test_kernel_and_reference_follow_the_definition(
    keys: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a past and without, in one piece and in several; tokens of other rows stay."""
    sizes = Sizes(ODD["heads"], ODD["nope"], ODD["rope"], ODD["value"], ODD["rank"], 4)
    monkeypatch.setattr(pagebus.kernels.latent.expanded_plan, "SCRATCH_BYTES", keys * sizes.expanded_bytes)
    case = make_latents([60, 200, 33, 90], [1, 37, 33, 20], **ODD, device=device)
    rows = (LongRow(1, 1, 37, 200), LongRow(2, 38, 33, 33), LongRow(3, 71, 20, 90))
    assert len(pieces_on(rows, 16, sizes.keys_together, device)) == (3 if keys == 128 else 1)
    expected, arguments = case.values().float(), {key: case.rows[key] for key in ("slots", "block_tables", "scale")}
    for attend in (expanded_attention, expanded_attention_reference):
        out = torch.full((len(case.q), ODD["heads"], ODD["value"]), 7.0, device=device)
        attend(case.q, case.cache, case.expansion, out, **arguments, rows=rows)
        assert (out[0] == 7.0).all()
        torch.testing.assert_close(out[1:], expected[1:], atol=1e-5, rtol=1e-4)


def test_scratch_memory_is_bounded() -> None:
    """Half a gigabyte for keys and values, and the rest in proportion to the new tokens."""
    assert scratch_bytes(8192, 163840, V2_LITE) < 700e6
    assert scratch_bytes(512, 600, V2_LITE) < scratch_bytes(8192, 163840, V2_LITE)
