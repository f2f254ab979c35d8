"""Compiles every launch shape that is considered for products, for a GPU that need not be here, and writes the table of
what each needs: ``python -m tests.kernels.linear.compile_shapes --arch 80 90 100 120``.

``--sample 1/40`` compiles the first of every 40 instead, and prints a JSON line for each: its place in the table, and
what it needs. Triton's cache keeps what is compiled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import torch
import triton
from triton.runtime.jit import JITFunction

import pagebus.kernels.common.pdl
import tests.kernels.compile_kernels as compiler
from pagebus.kernels.common.resources import Resources
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.layers.norm import NextNorm
from pagebus.kernels.linear.candidates import menu, splits_of
from pagebus.kernels.linear.linear import gated_linear, linear, residual_linear
from pagebus.kernels.linear.resources import COMPILED, COMPILED_FORMS, FOLDER, Variant, table, variant_of
from pagebus.kernels.linear.shapes import BUCKETS
from pagebus.kernels.linear.skinny_gemm import TileConfig

ROWS, INPUTS = 16128, 4096
"""Of the weights: no tile of them is cut off but those of rows that are no power of two."""


def variants(capability: int) -> Iterator[Variant]:
    """Every kernel once."""
    found = (
        variant_of(form, bucket, config)
        for form in COMPILED_FORMS
        for bucket in BUCKETS
        for config in menu(form, bucket, capability)
    )
    yield from sorted(set(found), key=repr)


def launch(variant: Variant) -> None:
    """As the wrappers do, on tensors of no memory."""
    config, bf16 = variant.config, torch.bfloat16
    x = compiler.meta(variant.tokens or 128, INPUTS, dtype=bf16)
    weight = compiler.meta(ROWS, INPUTS, dtype=bf16)
    if variant.form != "residual":
        (gated_linear if variant.form == "gated" else linear)(x, weight, config=config)
        return
    if isinstance(config, TileConfig) and len(splits_of("residual", config)) > 1:
        config = TileConfig(config.rows, config.tokens, config.depth, config.stages, config.warps, 2, config.tma)
    residual, norm = compiler.meta(len(x), ROWS, dtype=bf16), compiler.meta(ROWS, dtype=bf16)
    residual_linear(x, weight, None, residual, NextNorm(norm, 1e-5, compiler.meta(ROWS)), config)


def needs(variant: Variant, arch: int) -> Resources:
    """What the compiler says of it."""
    compiler.launches.clear()
    launch(variant)
    (only,) = compiler.launches
    found = compiler.report(*only, arch=arch)
    return Resources(*(int(str(found[name])) for name in Resources._fields))


def prepare(arch: int) -> None:
    """Launches are recorded from now on."""
    pagebus.kernels.common.pdl._supported = lambda _device: arch >= 90
    compile_for(Target(arch, 132))
    JITFunction.run = compiler.record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, default=COMPILED)
    parser.add_argument("--sample", metavar="NTH/OF")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        prepare(arch)
        todo = list(variants(arch))
        if arguments.sample:
            nth, of = map(int, arguments.sample.split("/"))
            for index in range(nth - 1, len(todo), of):
                print(json.dumps([index, *needs(todo[index], arch)]), flush=True)
            continue
        print(f"sm_{arch}: {len(todo)} variants", flush=True)
        found = {variant: needs(variant, arch) for variant in todo}
        (FOLDER / f"sm_{arch}.json").write_text(table(arch, triton.__version__, found))


if __name__ == "__main__":
    main()
