"""The cost model answers for every shape and GPU, and only with what the GPU can launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.kernels.common.machines import ARCHITECTURES, machine_of, machines
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.costs import CostModel
from pagebus.kernels.linear.dispatch import LinearChoice, choose_product, choose_residual_product
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.resources import resources, variant_of
from pagebus.kernels.linear.shapes import BUCKETS, FORMS, MANY, Config, LinearKernel, Product, is_legal, tokens_class
from pagebus.kernels.linear.waves import programs_held
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from tests.grids import examples

KNOWN = [Target(each.architecture.capability, each.multiprocessors, round(rate)) for each, rate in machines()]
targets = st.one_of(
    st.sampled_from(KNOWN),
    st.builds(
        Target,
        st.sampled_from([80, 86, 87, 89, 90, 100, 103, 120, 121]),
        st.integers(1, 300),
        st.sampled_from([0, 100, 900, 8000]),
    ),
)
sizes = st.one_of(st.integers(1, 300_000), st.sampled_from([64, 896, 1024, 2880, 3584, 4096, 14336, 18944, 128256]))
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
tokens = st.one_of(st.integers(0, 300), st.sampled_from(BUCKETS))


def assert_legal(config: Config, product: Product, num_tokens: int, target: Target) -> None:
    """The launch shape can compute the product, and this GPU holds a program of it that does not spill."""
    bucket = tokens_class(num_tokens)
    machine, capability = machine_of(target), target.capability
    assert is_legal(product, bucket, config)
    assert not isinstance(config, SpecializedConfig) or capability == 90
    if not isinstance(config, VectorConfig | SpecializedConfig):
        assert not config.tma or capability == 90
    needs = resources(capability)[variant_of(product.form, bucket, config)]
    assert needs.spilled == 0
    assert needs.shared <= machine.architecture.program_bytes
    assert programs_held(config, needs, machine) >= 1


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(FORMS), tokens, sizes, sizes, dtypes, targets)
def test_a_choice_can_be_launched(
    form: str, num_tokens: int, rows: int, inputs: int, dtype: torch.dtype, target: Target
) -> None:
    """Of any product on any GPU; what was measured on an H200 is held against the table elsewhere."""
    choice = choose_product(form, num_tokens, rows, inputs, dtype, target)
    if choice.config is None:
        assert choice.kernel is LinearKernel.CUBLAS
    else:
        assert dtype.itemsize == 2
        assert inputs % 8 == 0
        assert_legal(choice.config, Product(form, rows, inputs), num_tokens, target)
        assert form != "residual" or dtype == torch.bfloat16
    if choice.estimate is not None:
        assert 0 < choice.estimate.us < 1e9
        assert 0 < choice.estimate.library < 1e9


@settings(max_examples=examples(200), deadline=None)
@given(tokens, sizes, sizes, dtypes, targets, st.booleans(), st.booleans(), st.booleans())
def test_products_into_the_residual_can_be_launched(
    num_tokens: int, rows: int, inputs: int, dtype: torch.dtype, target: Target, biased: bool, adds: bool, norms: bool
) -> None:
    """Whatever is allowed of them; sums that nobody adds up are not split."""
    choice = choose_residual_product(
        num_tokens, rows, inputs, dtype, target, biased=biased, adds=adds, norms=norms
    )  # fmt: skip
    assert choice.form in ("plain", "partial", "residual", "added")
    if choice.config is not None and choice.form != "plain":
        assert_legal(choice.config, Product(choice.form, rows, inputs), num_tokens, target)
    if choice.form == "plain" and choice.config is not None and not isinstance(choice.config, VectorConfig):
        assert choice.config.splits == 1


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(["plain", "gated"]), st.integers(1, 300), sizes, sizes, targets)
def test_half_a_norm_is_always_completed(form: str, num_tokens: int, rows: int, inputs: int, target: Target) -> None:
    """By a kernel that can: the library cannot, nor can warps that only load."""
    choice = choose_product(form, num_tokens, rows, inputs, torch.bfloat16, target, half_normed=True)
    assert choice.kernel in (LinearKernel.GEMV, LinearKernel.SKINNY_GEMM)


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: f"{target.capability}-{target.num_multiprocessors}")
@pytest.mark.parametrize("form", FORMS)
def test_every_gpu_has_launch_shapes_for_every_form_and_bucket(form: str, target: Target) -> None:
    """Tables of what was compiled are there for all architectures, and not all of them spill."""
    model = CostModel(machine_of(target))
    for bucket in BUCKETS:
        if form != "residual" or bucket <= 32:
            assert model.shapes(form, bucket), (form, bucket)


def test_more_bytes_take_longer() -> None:
    """Of the same form, with the best launch shape of each."""
    for target in KNOWN:
        model = CostModel(machine_of(target))
        for bucket in BUCKETS:
            small, large = (model.best("plain", rows, 4096, bucket) for rows in (4096, 65536))
            assert small.us < large.us
            assert small.library < large.library


def test_faster_memory_takes_less_time() -> None:
    """An H100 and an H200 differ in nothing else; products of one token are bound by it."""
    h100, h200 = (CostModel(machine_of(Target(90, 132, rate))) for rate in (3352, 4917))
    assert (h100.machine.name, h200.machine.name) == ("H100 SXM", "H200")
    for form in ("plain", "gated", "wide"):
        assert h200.best(form, 28672, 4096, 1).us < 0.85 * h100.best(form, 28672, 4096, 1).us


def test_ranked_begins_with_the_best() -> None:
    """And its order is that of the times."""
    model = CostModel(machine_of(Target(90, 132)))
    ranked = model.ranked("partial", 4096, 11008, 8, 6)
    assert len(ranked) == 6
    assert [us for us, _ in ranked] == sorted(us for us, _ in ranked)
    best = model.best("partial", 4096, 11008, 8)
    assert (best.us, best.config) == ranked[0]
    for us, config in ranked:
        assert model.own(config, "partial", 4096, 11008, 8) == us


def test_the_library_keeps_what_was_not_fitted_unless_it_is_clearly_slower() -> None:
    """On GPUs that nobody has measured, an estimate has to win by more; on others one token has a kernel of its own."""
    for target in KNOWN:
        for rows, inputs in ((6144, 4096), (37888, 3584), (2560, 9728)):
            for bucket in BUCKETS[1:] if machine_of(target).measured else BUCKETS:
                choice: LinearChoice = choose_product("plain", bucket, rows, inputs, torch.bfloat16, target)
                if choice.config is not None and choice.estimate is not None and choice.source == "cost model":
                    share = choice.estimate.us / choice.estimate.library
                    assert share < (0.97 if machine_of(target).measured else 0.9)


def test_half_of_a_norm_is_not_begun_for_many_tokens() -> None:
    """By an estimate: the product behind it would have to be ours."""
    for target in KNOWN:
        assert choose_product("residual", 32, 5120, 5120, torch.bfloat16, target).config is None
        assert CostModel(machine_of(target)).ranked("residual", 5120, 5120, 32, 6)  # measuring may find that it pays


def test_no_estimate_where_none_is_meant() -> None:
    """Of many tokens, and in float32."""
    for count, dtype in ((MANY, torch.bfloat16), (8, torch.float32)):
        choice = choose_product("plain", count, 4096, 4096, dtype, Target(90, 132))
        assert (choice.kernel, choice.estimate) == (LinearKernel.CUBLAS, None)


def test_every_architecture_has_limits() -> None:
    """In order, with a program's shared memory below the multiprocessor's."""
    capabilities = [each.capability for each in ARCHITECTURES]
    assert capabilities == sorted(capabilities)
    assert all(each.program_bytes < each.shared_bytes for each in ARCHITECTURES)
