"""Measures the device's roofline: copy bandwidth and the rate of matrix products.

    python -m pagebus.actors.executor.device.roofline

Prints one JSON object. It is a separate process, so that it leaves nothing on the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from pagebus.actors.executor.device.device import new_event

COPY_BYTES = 2**31
GEMM_SIZE = 8192
WARM_CALLS, CALLS, ROUNDS = 5, 20, 5


def measure_ceilings() -> dict[str, float | str]:
    """Bytes read and written per second by a copy of 2 GiB, and operations per second of a bfloat16 product, in
    1e12: the best of a few rounds."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _seconds(partial(target.copy_, source))
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = _seconds(partial(torch.mm, a, b))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": 2 * COPY_BYTES / copy_s / 1e12,
        "gemm_tflop_per_s": 2 * GEMM_SIZE**3 / product_s / 1e12,
    }


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of one call by events, the best mean of several rounds."""
    for _ in range(WARM_CALLS):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        began, ended = new_event(timing=True), new_event(timing=True)
        began.record()
        for _ in range(CALLS):
            call()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1e3 / CALLS)
    return best


if __name__ == "__main__":
    print(json.dumps(measure_ceilings()))
