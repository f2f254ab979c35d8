"""Kinds of GPUs by what the driver tells of them."""

from __future__ import annotations

import pytest

from pagebus.kernels.common.machines import machine_of, machines, target_named
from pagebus.kernels.common.target import Target


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (Target(90, 132), "H200"),
        (Target(90, 132, 4917), "H200"),
        (Target(90, 132, 3352), "H100 SXM"),
        (Target(80, 108, 1555), "A100 40GB"),
        (Target(80, 108, 1935), "A100 80GB"),
        (Target(86, 82, 936), "RTX 3090"),
        (Target(89, 58, 300), "L4"),
        (Target(89, 128), "RTX 4090"),
        (Target(120, 170, 1792), "RTX 5090"),
    ],
)
def test_known_kinds(target: Target, name: str) -> None:
    assert machine_of(target).name == name


def test_one_that_nobody_knows() -> None:
    """Has the limits of its architecture, the driver's bandwidth, and no fit."""
    found = machine_of(Target(89, 60, 432))
    assert found.architecture.program_bytes == 99 * 1024
    assert 0.7 * 432e3 < found.bytes_per_us < 432e3
    assert not found.measured
    assert machine_of(Target(89, 60)).bytes_per_us > 0
    assert machine_of(Target(130, 200)).architecture.capability == 120
    assert machine_of(Target(75, 40)).architecture.capability == 80


def test_only_the_h200_was_measured() -> None:
    assert [machine.name for machine, _ in machines() if machine.measured] == ["H200"]


@pytest.mark.parametrize("name", ["L40S", "l40s", "4090", "RTX 4090", "rtx-4090", "H100", "A100", "b200"])
def test_names(name: str) -> None:
    """In any spelling, with its bandwidth: what is found is that kind."""
    found = target_named(name)
    assert found is not None
    assert found.memory_gb_per_s
    plain = machine_of(found).name.casefold().replace(" ", "")
    assert name.casefold().replace(" ", "").replace("-", "") in plain


@pytest.mark.parametrize("name", ["hopper", "", "rtx", "1", "sm_90"])
def test_what_is_no_name(name: str) -> None:
    assert target_named(name) is None
