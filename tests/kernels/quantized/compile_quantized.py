"""Compiles products with quantized weights for a GPU that need not be here:
``python -m tests.kernels.quantized.compile_quantized --arch 90``. Prints the lines of ``compile_kernels.py``."""

from __future__ import annotations

import argparse
import json

import tests.kernels.compile_kernels as compiler
from tests.grids import chosen
from tests.kernels.quantized.launches import quantized, quantized_experts

ELSEWHERE = ("_sort_kernel", "_count_kernel", "_sort_chunks_kernel", "_combine_kernel")
"""Kernels of experts that are compiled with those in 16 bits."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, required=True)
    arch = parser.parse_args().arch

    def launch() -> None:
        for cases in (quantized, quantized_experts):
            for compiler.case, call in cases(arch):
                call()

    compiler.record_launches(arch, launch)
    # The second product of experts is the same loop.
    ours = [
        each for each in compiler.launches if each[1].fn.__name__ not in ELSEWHERE and each[3].get("GATED") is not False
    ]
    for each in chosen(ours, compiler.SHARE, compiler.case_of, first=True):
        print(json.dumps(compiler.report(*each, arch=arch)), flush=True)


if __name__ == "__main__":
    main()
