"""The tables of what launch shapes of experts need: they have every candidate, and a compiler says the same today."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pagebus.kernels.linear.resources import COMPILED, family_of
from pagebus.kernels.moe.launch.candidates import every_product
from pagebus.kernels.moe.launch.resources import FOLDER, Variant, resources
from tests.kernels.warm import run

SAMPLED, SAMPLE = (80, 89, 90, 120), "7/111"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")


@pytest.mark.parametrize("capability", COMPILED)
def test_every_launch_shape_was_compiled(capability: int) -> None:
    """Both products of every way to multiply have some that do not spill."""
    known = resources(capability)
    asked = {Variant(*each) for each in every_product(capability)}
    assert asked == known.keys()
    for way, gated in {(each.way, each.gated) for each in asked}:
        assert any(not known[each].spilled for each in asked if (each.way, each.gated) == (way, gated))


@needs_triton
def test_a_sample_compiles_as_the_tables_say() -> None:
    """Shared memory is the same, and what does not spill there does not spill here. Registers too, by the version of
    Triton that a table names."""
    import triton

    done = run(["-m", "tests.kernels.moe.compile_shapes", "--sample", SAMPLE, "--arch", *map(str, SAMPLED)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {arch for arch, *_ in found} == set(SAMPLED)
    for arch, index, registers, spilled, shared in found:
        known = resources(arch)
        variant = sorted(known, key=repr)[index]
        assert shared == known[variant].shared, variant
        assert bool(spilled) == bool(known[variant].spilled), variant
        stored = json.loads((FOLDER / f"sm_{family_of(arch)}.json").read_text())
        if (stored["triton"], stored["capability"]) == (triton.__version__, arch):
            assert registers == known[variant].registers, variant
