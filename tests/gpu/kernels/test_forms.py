"""Decodes in every form: the usual one's results but for some last bits, and the same keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.kernels.attention.forms.form import FORMS, USUAL, DecodeForm, DecodeHeads
from pagebus.kernels.attention.forms.tables import replace_bucket
from pagebus.kernels.attention.paged_attention import AttentionShape, plan_attention
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.common.target import first_target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.shapes import bucket_of
from tests.gpu.kernels.cases import CUDA, SHAPES, relative_error
from tests.gpu.kernels.test_rotary_attention import LENS, run
from tests.kernels.attention.cases import AttentionCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("seeded"),
]

BATCHES = (LENS, [576] * 32, [384 + 8 * row for row in range(31)], [577, 0, 4000, 16, 1], [3000])
CASES = (
    ("glm4", torch.bfloat16), ("mistral", torch.bfloat16), ("gemma", torch.bfloat16), ("glm4", torch.float8_e4m3fn),
    ("llama8b", torch.int8),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)


def choose(form: DecodeForm, shape: str, rows: int, cache: torch.dtype, folder: Path) -> None:
    """From now on, for so many rows of heads like these."""
    q_heads, kv_heads, head_dim, _ = SHAPES[shape]
    target = first_target()
    assert target is not None
    heads = DecodeHeads(kv_heads, q_heads // kv_heads, head_dim, cache.itemsize)
    replace_bucket(user_path(target, folder, Tuned.ATTENTION), bucket_of(rows), heads, form)
    read_user_tables(folder)


def case_of(shape: str, lens: list[int], cache: torch.dtype) -> tuple[AttentionCase, torch.Tensor, dict[str, Any]]:
    q_heads, kv_heads, head_dim, window = SHAPES[shape]
    case = make_case(
        lens, [1] * len(lens), q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, window=window,
        dtype=torch.bfloat16, cache_dtype=cache, device=CUDA,
    )  # fmt: skip
    qkv = torch.randn(len(lens), q_heads + 2 * kv_heads, head_dim, device=CUDA).bfloat16()
    return case, qkv, {"cos_sin": torch.rand(4096, head_dim, device=CUDA) * 2 - 1}


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize(("shape", "cache"), CASES)
def test_every_form_gives_the_same(shape: str, cache: torch.dtype, form: DecodeForm, tmp_path: Path) -> None:
    """In one kernel and in two, whatever the lengths; the same bits every time."""
    for lens in BATCHES:
        case, qkv, norms = case_of(shape, lens, cache)
        for fused in (True, False):
            choose(USUAL, shape, len(lens), cache, tmp_path)
            expected, *written = run(case, case.keywords, qkv, norms, fused=fused)
            choose(form, shape, len(lens), cache, tmp_path)
            results = [run(case, case.keywords, qkv, norms, fused=fused) for _ in range(5)]
            assert all(torch.equal(result[0], results[0][0]) for result in results)
            assert relative_error(results[0][0], expected) < 4e-3
            for mine, other in zip(results[0][1:], written, strict=True):
                assert torch.equal(mine, other)


def test_a_graph_serves_any_lengths(tmp_path: Path) -> None:
    """It is captured with none; rows lie apart where their lengths allow it."""
    shape, form, rows = "glm4", DecodeForm(apart=True), 32
    q_heads, kv_heads, head_dim, _ = SHAPES[shape]
    case, qkv, norms = case_of(shape, [2000] * rows, torch.bfloat16)
    words, lens = case.keywords, torch.zeros(rows, dtype=torch.int32, device=CUDA)
    given = {name: words[name] for name in ("slots", "block_tables", "scale")}

    def attend(lens: torch.Tensor) -> torch.Tensor:
        plan = plan_attention(words["slots"], lens, AttentionShape(q_heads, kv_heads, head_dim, 2))
        return rotary_attention(
            qkv, norms["cos_sin"], case.k_cache, case.v_cache, context_lens=lens, plan=plan, **given
        )

    choose(form, shape, rows, torch.bfloat16, tmp_path)
    attend(lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(lens)
    choose(USUAL, shape, rows, torch.bfloat16, tmp_path)
    for wanted in ([576] * rows, [1] * rows, [2000] * rows, [20 * row for row in range(rows)]):
        lens.copy_(torch.tensor(wanted))
        graph.replay()
        expected, live = attend(lens), lens > 0
        assert relative_error(out[live], expected[live]) < 4e-3
