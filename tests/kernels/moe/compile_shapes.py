"""Compiles every launch shape that is considered for experts, for a GPU that need not be here, and writes the table of
what each needs: ``python -m tests.kernels.moe.compile_shapes --arch 80 90 100 120``.

``--sample 1/40`` compiles the first of every 40 instead, and prints a JSON line for each: for which GPU, its place in
the table, and what it needs. Triton's cache keeps what is compiled.
"""

from __future__ import annotations

import argparse
import json

import torch
import triton

import tests.kernels.compile_kernels as compiler
from pagebus.kernels.common.resources import Resources
from pagebus.kernels.linear.resources import COMPILED
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.experts import moe_experts
from pagebus.kernels.moe.launch.candidates import DOWN_PAIRS, GATE_UP_PAIRS, every_product
from pagebus.kernels.moe.launch.resources import FOLDER, Variant, table
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, PairConfig, Specialized, Unsorted
from pagebus.kernels.moe.weights import ExpertWeights
from tests.kernels.linear.compile_shapes import prepare

EXPERTS, TOP_K, SIZE, TOKENS = 8, 2, 4096, 16
PRODUCTS = ("_pair_gate_up_kernel", "_pair_down_kernel", "_grouped_kernel", "_experts_kernel")
"""Kernels of products; a launch has two, the gated one first."""


def variants(capability: int) -> list[Variant]:
    """Every kernel once."""
    return sorted({Variant(*each) for each in every_product(capability)}, key=repr)


def config_of(variant: Variant) -> Config:
    """Launch shapes of both products, of which one is wanted."""
    one, items = variant.config, variant.way.items
    if isinstance(one, PairConfig):
        return Unsorted(one, DOWN_PAIRS[0]) if variant.gated else Unsorted(GATE_UP_PAIRS[0], one)
    return Grouped(items, one, one) if isinstance(one, GroupConfig) else Specialized(items, one, one)


def launch(variant: Variant) -> None:
    """As the wrappers do, on tensors of no memory: of sizes that all tiles divide, with biases and a clamped gate."""
    bf16 = torch.bfloat16
    layer = ExpertWeights(
        compiler.meta(EXPERTS, 2 * SIZE, SIZE, dtype=bf16), compiler.meta(EXPERTS, SIZE, SIZE, dtype=bf16),
        compiler.meta(EXPERTS, 2 * SIZE, dtype=bf16), compiler.meta(EXPERTS, SIZE, dtype=bf16),
        Gate(GateKind.SWIGLU_CLAMPED),
    )  # fmt: skip
    chosen, weights = compiler.meta(TOKENS, TOP_K), compiler.meta(TOKENS, TOP_K, dtype=torch.float32)
    moe_experts(compiler.meta(TOKENS, SIZE, dtype=bf16), weights, chosen, layer, config_of(variant))


def needs(variant: Variant, arch: int) -> Resources:
    """What the compiler says of it."""
    compiler.launches.clear()
    launch(variant)
    products = [each for each in compiler.launches if each[1].fn.__name__ in PRODUCTS]
    assert len(products) == 2
    found = compiler.report(*products[0 if variant.gated else 1], arch=arch)
    return Resources(*(int(str(found[name])) for name in Resources._fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, default=COMPILED)
    parser.add_argument("--sample", metavar="NTH/OF")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        prepare(arch)
        todo = variants(arch)
        if arguments.sample:
            nth, of = map(int, arguments.sample.split("/"))
            for index in range(nth - 1, len(todo), of):
                print(json.dumps([arch, index, *needs(todo[index], arch)]), flush=True)
            continue
        print(f"sm_{arch}: {len(todo)} variants", flush=True)
        found = {variant: needs(variant, arch) for variant in todo}
        (FOLDER / f"sm_{arch}.json").write_text(table(arch, triton.__version__, found))


if __name__ == "__main__":
    main()
