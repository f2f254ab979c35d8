"""Compiles some launches for a GPU that need not be here: ``python -m tests.kernels.compile_sample --arch 86``.

Prints the lines of ``compile_kernels.py``. Left out is what no engine launches on such a GPU: Hopper's kernels, and
what `pagebus.actors.executor.device.gpu_limits` refuses. Products are left to ``linear/compile_shapes.py``, and the
attention of other GPUs to ``test_compile.py``. Which launch of a kernel is taken differs from GPU to GPU, so that
together they cover more than one. Of the small kernels some are compiled, or all (``tests/grids.py``).
"""

from __future__ import annotations

import argparse
import json

import tests.kernels.compile_kernels as compiler
from pagebus.actors.executor.device.gpu_limits import LEAST_OF_E4M3
from pagebus.kernels.common.target import Target
from tests.grids import chosen

ELSEWHERE = ("_specialized_kernel", "_prompts_kernel", "_attention_kernel", "_tiles_kernel", "_vector_kernel")
LARGE = ("_decode_kernel", "_prefill_kernel", "_grouped_kernel", "_pair_gate_up_kernel", "_pair_down_kernel")
E4M3 = "fp8e4nv"
ARCHITECTURES = (80, 120)


def is_launched(case: str, kernel: str, arch: int) -> bool:
    """Whether an engine may launch this on such a GPU."""
    if kernel in ELSEWHERE or (E4M3 in case and arch < LEAST_OF_E4M3):
        return False
    whole_cache = "cache bf16" in case or "cache fp32" in case
    refused = case.startswith(("latents", "expanded")) or ("d256" in case and whole_cache)
    return not (Target(arch, 100).small_memory and refused)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, required=True)
    arch = parser.parse_args().arch
    compiler.record_launches(arch)
    by_kernel: dict[str, list[int]] = {}
    for index, (case, kernel, _, _) in enumerate(compiler.launches):
        if is_launched(case, kernel.fn.__name__, arch):
            by_kernel.setdefault(kernel.fn.__name__, []).append(index)
    turn = ARCHITECTURES.index(arch)
    small = [name for name in by_kernel if name not in LARGE]
    for name in (*LARGE, *chosen(small, compiler.SHARE // 2, lambda name: (str(arch), name))):
        found = by_kernel[name]
        index = found[turn * len(found) // len(ARCHITECTURES)]
        print(json.dumps(compiler.report(*compiler.launches[index], arch=arch)), flush=True)


if __name__ == "__main__":
    main()
