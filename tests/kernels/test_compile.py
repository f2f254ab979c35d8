"""Kernels compile for GPUs that are not here, and stay within the registers and the shared memory these have."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import pagebus.kernels
from pagebus.kernels.attention.forms.launch import programs_held
from pagebus.kernels.linear.adapted import MOST_WITHIN
from tests.grids import needs_full
from tests.kernels.warm import run

SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 100: 227 * 1024, 120: 99 * 1024}
REGISTERS, WARPS = 65536, 4
"""Of a multiprocessor, and of a decode program."""
EXCHANGES = ("_one_shot_kernel", "_two_shot_kernel", "_gather_words_kernel", "_gather_rows_kernel")
QUANTIZED = {
    "_coded_kernel", "_dequantize_kernel", "_dequantize_words_kernel", "_round_tokens_kernel", "_scale_sums_kernel",
    "_rounded_activation_kernel", "_add_splits_kernel", "widening_kernel", "ring_kernel", "pairs_kernel",
}  # fmt: skip
"""Kernels that `tests.kernels.quantized.compile_quantized` compiles, and it alone."""
PARTS = 3
"""Each a test of its own, so that they run beside each other."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")


def compiled(arch: int, *options: str) -> list[Any]:
    """What ``compile_kernels.py`` prints, line by line."""
    done = run([str(Path(__file__).with_name("compile_kernels.py")), "--arch", str(arch), *options])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """The names of all kernels there are, from their sources."""
    sources = (path.read_text() for path in Path(pagebus.kernels.__file__).parent.rglob("*.py"))
    return {name for source in sources for name in re.findall(r"^def (\w*kernel)\(", source, re.M)}


def shrinks_within(variant: dict[str, Any]) -> bool:
    """Whether some of the programs of a product multiply with A."""
    found = re.search(r"adapted(?: (\w+))? linear of (\d+) tokens", variant["case"])
    if found is None or variant["kernel"] != "_tiles_kernel":
        return False
    return int(found[2]) <= MOST_WITHIN[found[1] or "plain"]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("arch", [90])
def test_kernels_compile(arch: int, part: int) -> None:
    """Every kernel there is, as wrappers launch it: no spills in half precision; tensor cores and early launches.
    `tests/grids.py` says in how many forms."""
    names, *variants = compiled(arch, "--part", f"{part}/{PARTS}")
    assert set(names) == kernels() - QUANTIZED, "a kernel is not launched"
    assert variants
    for variant in variants:
        assert variant["shared"] <= SHARED_LIMIT[arch], variant
        assert not variant["multicasts"], variant  # it needs a fabric manager, and hangs where that fails
        if variant["kernel"] in EXCHANGES:
            assert variant["waits"] == 1, variant
            unsignalled = "push" in variant["case"] or "few" in variant["case"]
            assert variant["signals"] == (0 if unsignalled else 7 if "of 8" in variant["case"] else 1), variant
        if "fp32" in variant["case"]:
            continue  # no tensor cores: exact rather than fast
        # With a window and a soft cap, blocks of 128 queries with heads of 256 lack eight registers.
        crowded = "d256" in variant["case"] and "window 4096" in variant["case"] and "softcap 50" in variant["case"]
        # Padded halves of heads, or very many heads, lack a few before the loop.
        crowded_head = variant["case"].startswith("raw") and ("d96" in variant["case"] or "64/4" in variant["case"])
        # Numbers that only a block's begin and end need, kept in memory during its loops.
        kept = 64 if " d256 long" in variant["case"] else 16 if "long" in variant["case"] else 0
        kept = 112 if " d256 long" in variant["case"] and "softcap 50" in variant["case"] else kept
        kept = 128 if variant["case"].startswith("expanded") and "256" in variant["case"] else kept
        # With two registers in memory one more program fits: ptxas takes 72, of which the kernel needs a few more.
        kept = 8 if variant["kernel"] == "_expand_kernel" and variant["registers"] == 72 else kept
        assert variant["spilled"] <= (32 if crowded else 16 if crowded_head else kept), variant
        if variant["kernel"] == "_decode_kernel":
            assert variant["mma"] + variant["wgmma"] > 0, variant
            assert variant["cp_async"] >= 20, variant  # keys and values, 16 bytes at a time, of two tiles
            if "fp8" in variant["case"]:  # 64 keys and values by 128 threads, two numbers at a time
                assert variant["conversions"] == (128 if "d256" in variant["case"] else 64), variant
            if "cache i8" in variant["case"]:  # keys are multiplied as they are, values need one step for two
                heads_of_128 = 2 if "d256" in variant["case"] else 1
                assert variant["whole"] == 8 * heads_of_128, variant
                assert 32 * heads_of_128 <= variant["sorted"] <= 48 * heads_of_128, variant
                assert variant["conversions"] == 0, variant
            # The grid has so many programs for every multiprocessor, which must hold them all at once.
            q_heads, kv_heads, head_dim = map(int, re.search(r"(\d+)/(\d+) d(\d+)", variant["case"]).groups())
            run = re.search(r" run=(\d+)", variant["case"])
            columns, programs, warps = q_heads // kv_heads * (int(run[1]) if run else 1), 1, 2 * WARPS
            if run is None or columns <= 32 or head_dim <= 64:
                programs, warps = programs_held(head_dim, columns), WARPS
            assert programs * variant["shared"] <= SHARED_LIMIT[arch], variant
            assert programs * 32 * warps * variant["registers"] <= REGISTERS, variant
        if variant["kernel"] == "_tiles_kernel":
            # What adapters add to a tile 8 tokens wide suits the older instruction, and the tile takes the same.
            adapted = "adapted" in variant["case"]
            older = adapted and "tokens=8" in variant["case"]
            assert variant["mma" if older else "wgmma"] > 0, variant
            assert variant["tma" if "tma=True" in variant["case"] else "cp_async"] > 0, variant
            few = "1024 rows" in variant["case"] or "adapted linear" in variant["case"]
            assert (variant["prefetches"] > 0) == (few or shrinks_within(variant)), variant
        if variant["kernel"] in ("_specialized_kernel", "_prompts_kernel", "_experts_kernel"):
            assert variant["wgmma"] > 0, variant
            assert variant["tma"] > 0, variant
            assert not variant["serialized"], variant
            assert variant["arrivals"] == variant["arrivals_of_all"] > 0, variant
            assert variant["waits"] == 1, variant
        if variant["kernel"] == "_plan_kernel":  # they come from memory, and that takes longer than running them
            assert variant["instructions"] < 2500, variant
        if variant["kernel"] in ("_tiles_kernel", "_vector_kernel", "_rms_norm_kernel", "_embedding_kernel"):
            assert variant["waits"] == (2 if shrinks_within(variant) else 1), variant
        if variant["kernel"] == "_rotary_kv_write_kernel":  # many small programs have to fit
            assert variant["registers"] <= 64, variant
        if variant["kernel"] == "_prefill_kernel":
            assert variant["wgmma"] > 0, variant
            assert variant["cp_async"] > 0, variant
            assert variant["waits"] == 1, variant
            # Keys are cut for two programs of 64 queries on every multiprocessor, or for one of few tokens with all
            # heads of a KV head. It must hold them.
            alone = any(each in variant["case"] for each in ("d256", "4096 window", " few "))
            programs = 1 if alone else 2
            assert programs * variant["shared"] <= SHARED_LIMIT[arch], variant
        if variant["kernel"] == "_attention_kernel":
            assert variant["wgmma"] > 0, variant
            assert variant["tma"] > 0, variant
            assert not variant["serialized"], variant
            assert {240, 24} <= set(variant["thread_registers"]), variant
            assert variant["arrivals"] == variant["arrivals_of_all"] > 0, variant
        if variant["kernel"] == "_grouped_kernel":
            assert variant["wgmma"] > 0, variant
            assert variant["tma"] > 0 or "invariant" in variant["case"], variant
            assert not variant["serialized"], variant
            assert variant["waits"] == 1, variant
        if variant["kernel"] == "_merge_blocks_kernel":
            assert variant["waits"] == 1, variant
            # Many small programs, idle as a rule; results of latents are four times as wide.
            assert variant["registers"] <= (168 if variant["case"].startswith("latents") else 72), variant


@needs_triton
@pytest.mark.parametrize("arch", [needs_full(80), 89, needs_full(120)])
def test_attention_fits_other_gpus(arch: int) -> None:
    """Heads of 256 too, into 99 KiB of shared memory where there is no more; results stay in registers. 86 has the
    limits of 89, and 100 those of 90."""
    variants = compiled(arch, "--heads")
    assert {"_decode_kernel", "_prefill_kernel"} <= {variant["kernel"] for variant in variants}
    for variant in variants:
        assert variant["shared"] <= SHARED_LIMIT[arch], variant
        assert variant["spilled"] <= 64, variant
        if variant["kernel"] == "_decode_kernel" and "64/4" not in variant["case"]:
            head_dim = int(re.search(r" d(\d+)", variant["case"])[1])
            held = programs_held(head_dim, 8) // (2 if arch in (86, 89, 120) else 1)
            assert held * (variant["shared"] + 1024) <= SHARED_LIMIT[arch] + 1024, variant
