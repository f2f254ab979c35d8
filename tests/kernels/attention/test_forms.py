"""Which form decodes take: a user's table before the shipped one, and the usual form where neither knows the heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagebus.kernels.attention.forms.choice import FormChoice, choose_form
from pagebus.kernels.attention.forms.form import FORMS, USUAL, DecodeForm, DecodeHeads
from pagebus.kernels.attention.forms.tables import TABLES, load_table, load_user_table, replace_bucket
from pagebus.kernels.attention.paged_attention import AttentionShape
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.latent.shape import LatentShape
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.shapes import BUCKETS

H200 = Target(90, 132, 4917)
HEADS, OTHERS = DecodeHeads(3, 5, 112, 2), DecodeHeads(3, 5, 112, 1)
APART = DecodeForm(32, apart=True)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)
    compile_for(None)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path: Path) -> None:
    """Forms that are tried, of buckets that exist."""
    for forms in load_table(path).values():
        assert set(forms) <= set(BUCKETS)
        assert set(forms.values()) <= set(FORMS)


def test_a_table_decides(tmp_path: Path) -> None:
    """For its heads and buckets, and down to the next bucket; never on a CPU."""
    replace_bucket(user_path(H200, tmp_path, Tuned.ATTENTION), 32, HEADS, APART)
    assert choose_form(32, HEADS, H200) == FormChoice(USUAL, Source.RULE)
    read_user_tables(tmp_path)
    assert choose_form(32, HEADS, H200) == choose_form(17, HEADS, H200) == FormChoice(APART, Source.USER)
    for rows, heads, target in ((16, HEADS, H200), (33, HEADS, H200), (32, OTHERS, H200), (32, HEADS, None)):
        assert choose_form(rows, heads, target) == FormChoice(USUAL, Source.RULE)
    assert choose_form(1000, HEADS, H200).form == USUAL


def test_buckets_are_replaced(tmp_path: Path) -> None:
    """One by one; a row without any goes."""
    path = tmp_path / "table.json"
    for bucket, form in ((32, APART), (8, USUAL), (32, None)):
        replace_bucket(path, bucket, HEADS, form)
    replace_bucket(path, 1, OTHERS, APART)
    assert load_table(path) == {HEADS: {8: USUAL}, OTHERS: {1: APART}}
    replace_bucket(path, 8, HEADS, None)
    assert load_table(path) == {OTHERS: {1: APART}}


@pytest.mark.parametrize("damage", ["{", '[{"kv_heads": 3}]', '[{"buckets": {"32": {"tile": 48}}}]', "7"])
def test_a_damaged_table_is_none(damage: str, tmp_path: Path) -> None:
    """It only makes steps faster."""
    path = user_path(H200, tmp_path, Tuned.ATTENTION)
    replace_bucket(path, 32, HEADS, DecodeForm(48))
    assert load_user_table(H200, tmp_path) == {}
    path.write_text(damage)
    read_user_tables(None)
    assert load_user_table(H200, tmp_path) == {}


def test_plans_are_made_so(tmp_path: Path) -> None:
    """Of decodes in 16 bits; latents, runs of tokens and float32 have one form."""
    replace_bucket(user_path(H200, tmp_path, Tuned.ATTENTION), 32, HEADS, APART)
    read_user_tables(tmp_path)
    compile_for(H200)
    rows = torch.zeros(20, dtype=torch.int32, device="meta")
    shape = AttentionShape(15, 3, 112, 2, frozenset({0, 64}), run=4)
    assert (shape.form(20, H200), shape.form(20, None)) == (APART, USUAL)
    assert AttentionShape(15, 3, 112, 4).form(20, H200) == USUAL
    assert LatentShape(15, 3, 112, 2).form(20, H200) == USUAL
    config = shape.decodes(132, form=shape.form(len(rows), H200))
    assert (config.tile, config.apart) == (32, True)
