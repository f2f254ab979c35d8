"""How long launches of our kernels take the host, without a GPU: ``python -m tests.kernels.bench_launches``.

Triton's own way from a call to the driver, which launches nothing here: microseconds by the clock. ``--plain``: the
constants of modules are Triton's own, as if :func:`pagebus.kernels.common.triton.constant` were ``tl.constexpr``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from triton.runtime import driver

import pagebus.kernels.common.triton

WARM, LAUNCHES = 20, 500
META = torch.device("meta")


def microseconds(launch: Callable[[], object]) -> str:
    took = []
    for _ in range(WARM + LAUNCHES):
        began = time.perf_counter()
        launch()
        took.append((time.perf_counter() - began) * 1e6)
    return f"{statistics.median(took[WARM:]):.1f} us, at least {min(took):.1f}"


def measure() -> None:
    """A product of 128 tokens, with the tensor memory accelerator and without, and a norm."""
    from pagebus.actors.executor.loading.compilation import AbsentGpu, Recorder, leave_out_torch_compile
    from pagebus.kernels.common.cache_keys import settle_keys
    from pagebus.kernels.common.target import Target, compile_for
    from pagebus.kernels.layers.norm import rms_norm
    from pagebus.kernels.linear import skinny_gemm

    leave_out_torch_compile()
    target = Target(90, 132)
    compile_for(target)
    driver.set_active(AbsentGpu(target))
    settle_keys()
    x, weight, bias, out = (
        torch.empty(size, device=META, dtype=torch.bfloat16) for size in ((128, 1024), (4096, 1024), 4096, (128, 4096))
    )
    with torch.inference_mode(), Recorder(set(), lambda kernel: None):
        for tma in (False, True):
            config = skinny_gemm.TileConfig(64, 64, 128, 4, 4, tma=tma)
            took = microseconds(lambda: skinny_gemm.tiles_linear(x, weight, bias, out, config, gated=0))  # noqa: B023
            print(f"product, tma={tma}: {took}; {len(skinny_gemm._tiles_kernel.used_global_vals)} constants")
        print(f"norm: {microseconds(lambda: rms_norm(x, bias[:1024], 1e-5))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    if parser.parse_args().plain:
        pagebus.kernels.common.triton.constant = pagebus.kernels.common.triton.tl.constexpr
    measure()


if __name__ == "__main__":
    main()
