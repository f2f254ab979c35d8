"""Compiles the launch shapes that are considered for quantized weights on Hopper, which need not be here, and writes
the table of what each needs: ``python -m tests.kernels.quantized.compile_shapes [--part 1/2]``.

``--part`` only compiles a share, for Triton's cache: several processes can divide the work, and one writes the table
afterwards. ``--sample 1/40`` prints a JSON line for the first of every 40: its place in the table, and what it needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton

import tests.kernels.compile_kernels as compiler
from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.resources import Resources
from pagebus.kernels.linear.linear import gated_linear, linear
from pagebus.kernels.linear.shapes import BUCKETS
from pagebus.kernels.quantized.candidates import FOLDER, CodedVariant, menu, table
from pagebus.kernels.quantized.coding import Kind, coded_of
from pagebus.kernels.quantized.layouts import Layout
from tests.kernels.linear.compile_shapes import prepare
from tests.kernels.quantized.launches import E4M3, INT8, KINDS, floats, rounded_blocks, w8_rows

ARCH, ROWS, INPUTS = 90, 16384, 4096
COMPILED: dict[Kind, Callable[[int, int], Layout]] = {
    Kind(Code.E4M3, rounded=True): partial(w8_rows, E4M3),
    Kind(Code.INT8, rounded=True): partial(w8_rows, INT8),
    Kind(Code.E4M3, 128, 128, rounded=True): rounded_blocks,
    Kind(Code.E4M3, 128, 128): KINDS["fp8 128x128"],
    Kind(Code.WORDS, 1, 128, zeros=True): KINDS["int4 128 zeros"],
    Kind(Code.WORDS, 1, 128): KINDS["int4 128"],
    Kind(Code.WORDS, 1, 32): KINDS["int4 32"],
    Kind(Code.E2M1, 1, 32): partial(floats, 32, torch.uint8),
}
"""Layouts that are downloaded most."""


def variants() -> Iterator[CodedVariant]:
    """Every kernel once."""
    found = {
        CodedVariant(kind.name, gated, config): kind
        for kind in COMPILED
        for gated in (False, True)
        for bucket in BUCKETS
        for config in menu(bucket, kind)
    }
    yield from sorted(found, key=repr)


def needs(variant: CodedVariant) -> Resources:
    """What the compiler says of it."""
    make = next(make for kind, make in COMPILED.items() if kind.name == variant.layout)
    weight, config = coded_of(make(ROWS, INPUTS)), variant.config
    compiler.launches.clear()
    x = compiler.meta(getattr(config, "tokens", 1), INPUTS, dtype=torch.bfloat16)
    (gated_linear if variant.gated else linear)(x, weight, config=config)
    found = compiler.report(*compiler.launches[-1], arch=ARCH)
    return Resources(*(int(str(found[name])) for name in Resources._fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", metavar="NTH/OF")
    parser.add_argument("--sample", metavar="NTH/OF")
    arguments = parser.parse_args()
    prepare(ARCH)
    todo = list(variants())
    if arguments.part or arguments.sample:
        nth, of = map(int, (arguments.part or arguments.sample).split("/"))
        for index in range(nth - 1, len(todo), of):
            print(json.dumps([index, *needs(todo[index])]), flush=True)
        return
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"sm_{ARCH}.json").write_text(table(ARCH, triton.__version__, {each: needs(each) for each in todo}))


if __name__ == "__main__":
    main()
