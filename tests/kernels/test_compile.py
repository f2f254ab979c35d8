"""Kernels compile for GPUs that are not here, and stay within the registers and the shared memory these have."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}
ROOT = Path(__file__).parents[2]


def has_assembler() -> bool:
    """Whether Triton with its NVIDIA backend is installed."""
    return importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not has_assembler(), reason="no Triton on this platform")
@pytest.mark.parametrize("arch", [90])
def test_kernels_compile(arch: int) -> None:
    """Attention, sampling and norms as their wrappers launch them: no spills in half precision, tensor cores used."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(arch)],
        capture_output=True, text=True, env=environment, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    assert {
        "_decode_kernel", "_combine_kernel", "_prefill_kernel", "_pick_kernel", "_limits_kernel", "_logprobs_kernel",
        "_token_masks_kernel", "_bad_words_kernel",
    } <= {variant["kernel"] for variant in variants}  # fmt: skip
    for variant in variants:
        assert variant["shared"] <= SHARED_LIMIT[arch], variant
        if "fp32" in variant["case"]:
            continue  # no tensor cores: exact rather than fast
        assert variant["spilled"] == 0, variant
        if variant["kernel"] == "_decode_kernel":
            assert variant["mma"] > 0, variant
            assert variant["cp_async"] > 0, variant
        if variant["kernel"] == "_prefill_kernel":
            assert variant["wgmma"] > 0, variant
