"""Launch shapes of experts fit every GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.kernels.common.machines import architecture_of
from pagebus.kernels.common.target import Target
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.launch.rule import choose_invariant
from pagebus.kernels.moe.launch.shapes import Grouped, PairConfig, Shape, Specialized
from tests.grids import examples

shapes = st.builds(
    Shape, st.sampled_from([1, 8, 60, 128, 512]), st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 64).map(lambda n: 64 * n), st.integers(1, 256).map(lambda n: 16 * n),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 10_000), shapes, st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([80, 86, 89, 90, 100, 120]), st.booleans(),
)  # fmt: skip
def test_stages_fit_shared_memory(
    num_tokens: int, shape: Shape, dtype: torch.dtype, capability: int, invariant: bool
) -> None:
    """Of both products. Hopper and later hold every stage; before, what is multiplied next is in registers."""
    target = Target(capability, 100)
    given_ = num_tokens, shape, dtype
    config = choose_invariant(*given_) if invariant else choose(*given_, target)
    if not isinstance(config, Grouped):
        return
    for halves, each in ((2, config.gate_up), (1, config.down)):
        stages = each.stages if capability in (90, 100) else each.stages - 1
        needed = (halves * each.rows + config.tokens) * each.depth * dtype.itemsize * stages
        assert needed <= architecture_of(capability).program_bytes - 1024
        assert not each.tma or capability == 90


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_gpu_has_both_kinds(capability: int) -> None:
    """Few tokens unsorted, many grouped."""
    shape, target = Shape(128, 8, 2048, 768), Target(capability, 100)
    kinds = [type(choose(count, shape, torch.bfloat16, target)).__name__ for count in (1, 4096)]
    assert kinds == ["Unsorted", "Specialized" if capability == 90 else "Grouped"]


@pytest.mark.parametrize(
    ("shape", "tokens", "kind"),
    [
        (Shape(128, 8, 2048, 768), 4096, "Specialized"),
        (Shape(32, 4, 2880, 2880), 4096, "Specialized"),
        (Shape(128, 8, 2048, 768), 512, "Grouped"),  # items are shorter
        (Shape(60, 4, 2048, 344), 4096, "Grouped"),  # no whole steps
    ],
)
def test_hopper_takes_its_own_kernel_where_items_are_long(shape: Shape, tokens: int, kind: str) -> None:
    """If steps of 64 divide both sizes. Tiles have one piece: what the kernel multiplies at once."""
    config = choose(tokens, shape, torch.bfloat16, Target(90, 132))
    assert type(config).__name__ == kind
    if isinstance(config, Specialized):
        assert all(len(each.pieces) == 1 for each in (config.gate_up, config.down))


@pytest.mark.parametrize(("inputs", "pieces"), [(2048, 64), (1536, 64), (96, 4), (72, 1), (36, 1)])
def test_rows_are_called_into_the_cache_in_whole_pieces(inputs: int, pieces: int) -> None:
    """Of 16 bytes or more each; a row that cannot be cut so is asked for as a whole."""
    config = PairConfig(rows=2, depth=512, warps=4)
    assert config.pieces(inputs) == pieces
    assert pieces == 1 or inputs % (8 * pieces) == 0
