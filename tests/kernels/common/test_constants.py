"""Constants of modules of kernels."""

from __future__ import annotations

import copy

import pytest

from pagebus.kernels.common.triton import constant, tl


def test_a_constant_is_compared_with_itself() -> None:
    """At each launch Triton compares a module's constant with a copy of what it was."""
    value = constant("mov.b32 $0, $1;")

    for same in (copy.copy(value), copy.deepcopy(value)):
        assert same is value
    assert not value != copy.deepcopy(value)  # noqa: SIM202  (this is what Triton asks)


@pytest.mark.parametrize("other", [constant(4), tl.constexpr(4), 4])
def test_another_value_is_another(other: object) -> None:
    """Of whatever kind, as of Triton's own constants; an equal one is no other."""
    assert constant(3) != other
    assert not constant(4) != other  # noqa: SIM202
    assert isinstance(constant(3), tl.constexpr)
    assert repr(constant(3)) == repr(tl.constexpr(3))
