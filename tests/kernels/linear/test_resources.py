"""The tables of registers, spills and shared memory: what they hold, and that a compiler says the same today."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pagebus.kernels.linear.candidates import menu
from pagebus.kernels.linear.resources import COMPILED, COMPILED_FORMS, FOLDER, family_of, resources, variant_of
from pagebus.kernels.linear.shapes import BUCKETS
from tests.kernels.warm import run

SAMPLES = {80: "7/72", 86: "29/72", 89: "41/72", 90: "11/70", 100: "17/72", 120: "52/60"}
"""Of the variants of a table, those that are compiled anew: others for each GPU, and few, as each takes a second."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")


@pytest.mark.parametrize("capability", COMPILED)
def test_every_launch_shape_was_compiled(capability: int) -> None:
    """Of every form and bucket; some of each form neither spill nor exceed shared memory."""
    known = resources(capability)
    for form in COMPILED_FORMS:
        asked = {variant_of(form, bucket, config) for bucket in BUCKETS for config in menu(form, bucket, capability)}
        assert asked <= known.keys()
        assert any(not known[variant].spilled for variant in asked)
    assert all(16 <= needs.registers <= 255 for needs in known.values())


def test_a_newer_gpu_takes_the_table_of_the_last_known_family() -> None:
    assert [family_of(capability) for capability in (75, 80, 86, 89, 90, 100, 103, 120, 121)] == [
        80, 80, 80, 80, 90, 100, 100, 120, 120,
    ]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("capability", SAMPLES)
def test_a_sample_compiles_as_the_table_says(capability: int) -> None:
    """Shared memory is the same, and what does not spill there does not spill here. Registers too, by the version of
    Triton that the table names."""
    import triton

    sample = ["--arch", str(capability), "--sample", SAMPLES[capability]]
    done = run(["-m", "tests.kernels.linear.compile_shapes", *sample])
    assert done.returncode == 0, done.stderr[-3000:]
    known = resources(capability)
    stored = json.loads((FOLDER / f"sm_{family_of(capability)}.json").read_text())
    variants = sorted(known, key=repr)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 2
    for index, registers, spilled, shared in found:
        needs = known[variants[index]]
        assert shared == needs.shared, variants[index]
        assert bool(spilled) == bool(needs.spilled), variants[index]
        if stored["triton"] == triton.__version__ and stored["capability"] == capability:
            assert registers == needs.registers, variants[index]
