"""Products with quantized weights compile for GPUs that are not here, as the rule chooses their launch shapes."""

from __future__ import annotations

import json

import pytest

from tests.grids import needs_full
from tests.kernels.test_compile import QUANTIZED, SHARED_LIMIT, needs_triton
from tests.kernels.warm import run


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, needs_full(80), 89])
def test_nothing_spills(arch: int) -> None:
    """Tensor cores get weights from registers, and shared memory suffices. 120 has the limits of 89."""
    done = run(["-m", "tests.kernels.quantized.compile_quantized", "--arch", str(arch)])
    assert done.returncode == 0, done.stderr[-3000:]
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    launched = QUANTIZED if arch == 90 else QUANTIZED - {"widening_kernel", "ring_kernel", "pairs_kernel"}
    names = {variant["kernel"] for variant in variants}
    assert names == launched | {"_vector_kernel", "_tiles_kernel", "_rms_norm_kernel"}
    for variant in variants:
        assert variant["shared"] <= SHARED_LIMIT[arch], variant
        # Of 16 tokens, numbers that only a tile's end needs are kept in memory.
        assert variant["spilled"] <= (32 if "16 tokens through a ring" in variant["case"] else 0), variant
        if variant["kernel"] in ("ring_kernel", "pairs_kernel"):
            assert variant["mma"] > 0, variant
            assert variant["tma"] > 0, variant
        if variant["kernel"] in ("_tiles_kernel", "_coded_kernel"):
            assert variant["wgmma"] + variant["mma"] > 0, variant
            assert variant["cp_async"] > 0, variant
        if variant["kernel"] == "widening_kernel":
            assert variant["arrivals"] == variant["arrivals_of_all"] > 0, variant
            assert variant["wgmma"] > 0, variant
            assert variant["tma"] > 0, variant
            assert not variant["serialized"], variant
