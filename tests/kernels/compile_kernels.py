"""Compiles what the kernels' wrappers launch for a GPU that need not be here: `python compile_kernels.py --arch 90`.

Prints one JSON line per kernel variant: name, registers, spilled bytes, shared memory and the matrix instructions used.
`--part 1/6` compiles the first of six shares, so that several processes can divide the work; Triton's cache is theirs
together. Its first line are the names of all kernels that are launched. `--heads` compiles attention of some heads.
Of the launches of each kernel some are compiled, or all (`tests/grids.py`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import pagebus.kernels.common.pdl
from pagebus.kernels.attention.gather import gather_tokens, merge_attention
from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    Spans,
    capability_of,
    paged_attention,
    paged_attention_invariant,
    plan_attention,
    plan_attention_invariant,
    prompts_config,
)
from pagebus.kernels.attention.prefill_plan import prefill_config
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.common.triton import LayoutDescriptor
from pagebus.kernels.layers.branch_norm import add_normed
from pagebus.kernels.layers.embedding import embedding
from pagebus.kernels.layers.logits import cap_logits
from pagebus.kernels.layers.norm import NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.layers.rotary_kv_write import MANY_TOKENS, rotary_kv_write
from pagebus.kernels.linear.activation import silu_mul
from pagebus.kernels.linear.dispatch import invariant_config
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from tests.grids import chosen
from tests.kernels.assembler import keep_reports
from tests.kernels.attention.launches import attentions, meta, meta_cache
from tests.kernels.batch.launches import drafts_and_parts, inputs
from tests.kernels.exchange.launches import exchanges
from tests.kernels.latent.launches import latents
from tests.kernels.lora.launches import adapters
from tests.kernels.moe.launches import mixtures
from tests.kernels.sampling.launches import samplings

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
SHARE = 16
"""Of the forms of a kernel the first is compiled, and of the others one in so many."""
ARRIVAL = "mbarrier.arrive.shared::cta.b64"
"""By one thread for all of a warpgroup, which must have met before."""
launches: list[tuple[str, JITFunction, list[object], dict[str, object]]] = []
case = ""


def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
    """Stands in for a launch: keeps what would have been launched."""
    launches.append((case, self, list(args), kwargs))


def case_of(launch: tuple[str, JITFunction, list[object], dict[str, object]]) -> tuple[str, str]:
    """The kernel and the case."""
    return launch[1].fn.__name__, launch[0]


def source_of(kernel: JITFunction, args: list[object], kwargs: dict[str, object]) -> ASTSource:
    """The kernel specialised as a launch would: 16-byte alignment and divisibility by 16 where they are looked at."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, param in enumerate(kernel.params):
        value = args[index] if index < len(args) else kwargs[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name], aligned = "*" + TYPES[value.dtype], True
        elif isinstance(value, TensorDescriptor):
            signature[param.name], aligned = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>", False
        elif isinstance(value, LayoutDescriptor):
            block = f"{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}"
            signature[param.name], aligned = f"tensordesc<{block}>", False
        elif isinstance(value, float):
            signature[param.name], aligned = "fp32", False
        else:
            signature[param.name], aligned = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
        if aligned and not param.do_not_specialize and not param.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)


def report(
    name: str, kernel: JITFunction, args: list[object], kwargs: dict[str, object], arch: int
) -> dict[str, object]:
    """Compile one launch and read the assembler's resource report."""
    keep_reports()
    options = {key: kwargs[key] for key in OPTIONS if key in kwargs}
    compiled = triton.compile(source_of(kernel, args, kwargs), target=GPUTarget("cuda", arch, 32), options=options)
    ptx, text = compiled.asm["ptx"], compiled.metadata.assembler
    return {
        "case": name,
        "kernel": kernel.fn.__name__,
        "registers": int(re.search(r"Used (\d+) registers", text).group(1)),
        "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", text)),
        "shared": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "cp_async": ptx.count("cp.async.c"),
        "conversions": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "sorted": ptx.count("prmt.b32"),
        "whole": ptx.count(".s32.s8.s8.s32"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "thread_registers": [int(count) for count in re.findall(r"setmaxnreg\S+\s+(\d+)", ptx)],
        "arrivals": ptx.count(ARRIVAL),
        "arrivals_of_all": len(re.findall(rf"bar\.sync[^;]*;(?:(?!wgmma|mbarrier).)*{re.escape(ARRIVAL)}", ptx, re.S)),
        "serialized": "serialized" in text,
        "prefetches": ptx.count("cp.async.bulk.prefetch.L2"),
        "waits": ptx.count("griddepcontrol.wait"),
        "multicasts": ptx.count("multimem"),
        "signals": ptx.count("st.release.sys"),
        "instructions": ptx.count(";"),
    }


def launch_attention(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rows: int, decodes: int, queries: int, window: int,
    cache_dtype: torch.dtype | None = None, *, fixed: bool = False, softcap: float = 0.0, sinks: bool = False,
) -> None:  # fmt: skip
    """Launch attention on tensors of no memory; `queries` tokens in each row that is no decode. fixed: for a graph."""
    global case
    cache_dtype = cache_dtype or dtype
    case = f"{q_heads}/{kv_heads} d{head_dim} {TYPES[dtype]} rows {rows} queries {queries} window {window} {fixed=}"
    case += f" cache {TYPES[cache_dtype]} softcap {softcap} {sinks=}"
    tokens = decodes + (rows - decodes) * queries
    *caches, scales = meta_cache(cache_dtype, kv_heads, head_dim)
    float8 = cache_dtype.itemsize == 1
    lengths = (0, 0) if fixed else (queries, 8 * queries)
    capability = capability_of(torch.device("meta"))
    config = prefill_config(*lengths, head_dim, dtype.itemsize, float8=float8, capability=capability)
    shape = AttentionShape(
        q_heads, kv_heads, head_dim, dtype.itemsize, frozenset({window}), float8=float8, capability=capability
    )
    paged_attention(
        meta(tokens, q_heads, head_dim, dtype=dtype), *caches, slots=meta(rows),
        query_start=meta(rows + 1), context_lens=meta(rows), block_tables=meta(64, 512), scale=0.1,
        num_decodes=decodes, sliding_window=window, softcap=softcap, decode_lens=meta(rows) if fixed else None,
        kv_scales=scales, sinks=meta(q_heads, dtype=torch.float32) if sinks else None,
        plan=plan_attention(meta(decodes), meta(decodes), shape, Spans(config, meta(64, 5), meta(4, 4))),
    )  # fmt: skip


def launch_invariant_attention(
    q_heads: int, kv_heads: int, head_dim: int, cache_dtype: torch.dtype, *, sinks: bool = False
) -> None:
    """Launch attention of rows that are all prompts, each with all heads of a KV head in its tiles."""
    global case
    case, bf16 = f"{q_heads}/{kv_heads} d{head_dim} invariant cache {TYPES[cache_dtype]} {sinks=}", torch.bfloat16
    *caches, scales = meta_cache(cache_dtype, kv_heads, head_dim)
    shape = AttentionShape(q_heads, kv_heads, head_dim, 2, float8=scales is not None)
    spans = Spans(prompts_config(shape, invariant=True), meta(64, 5), meta(0, 4))
    paged_attention_invariant(
        meta(64, q_heads, head_dim, dtype=bf16), *caches, slots=meta(8), query_start=meta(9),
        context_lens=meta(8), block_tables=meta(64, 512), scale=0.1, num_decodes=7, kv_scales=scales,
        sinks=meta(q_heads, dtype=torch.float32) if sinks else None,
        plan=plan_attention_invariant(meta(7), meta(7), shape, spans),
    )  # fmt: skip


def launch_rotary_attention(
    q_heads: int, kv_heads: int, head_dim: int, cache_dtype: torch.dtype, *, norms: bool, sinks: bool = False
) -> None:
    """Launch attention of decodes that writes their keys and values itself."""
    global case
    case = f"raw {q_heads}/{kv_heads} d{head_dim} cache {TYPES[cache_dtype]} norms {norms} {sinks=}"
    bf16, fp32, float8 = torch.bfloat16, torch.float32, cache_dtype.itemsize == 1
    *caches, scales = meta_cache(cache_dtype, kv_heads, head_dim)
    shape = AttentionShape(q_heads, kv_heads, head_dim, 2, float8=float8)
    weight = meta(head_dim, dtype=bf16) if norms else None
    rotary_attention(
        meta(64, q_heads + 2 * kv_heads, head_dim, dtype=bf16), meta(4096, head_dim, dtype=fp32), *caches,
        slots=meta(64), context_lens=meta(64), block_tables=meta(64, 512), scale=0.1,
        kv_scales=scales, sinks=meta(q_heads, dtype=torch.float32) if sinks else None,
        q_norm=weight, k_norm=weight, eps=1e-6, plan=plan_attention(meta(64), meta(64), shape),
    )  # fmt: skip


def launch_write(q_heads: int, kv_heads: int, head_dim: int, cache_dtype: torch.dtype, *, norms: bool) -> None:
    global case
    case = f"write {q_heads}/{kv_heads} d{head_dim} cache {TYPES[cache_dtype]} norms {norms}"
    *caches, scales = meta_cache(cache_dtype, kv_heads, head_dim)
    weight = meta(head_dim, dtype=torch.bfloat16) if norms else None
    for tokens in (256, MANY_TOKENS):
        rotary_kv_write(
            meta(tokens, q_heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16), meta(tokens),
            meta(4096, head_dim, dtype=torch.float32), *caches, meta(tokens, dtype=torch.int64),
            q_norm=weight, k_norm=weight, eps=1e-6, kv_scales=scales,
        )  # fmt: skip


def launch_linear(
    call: Callable[..., object], tokens: int, config: Config, dtype: torch.dtype = torch.bfloat16, rows: int = 28672
) -> None:
    """A product with weights [rows, 4096]."""
    global case
    case = f"{TYPES[dtype]} {getattr(call, '__name__', 'gelu')} of {tokens} tokens, {rows} rows, {config}"
    call(meta(tokens, 4096, dtype=dtype), meta(rows, 4096, dtype=dtype), config=config)


def launch_residual(tokens: int, config: Config, inputs: int, following: dict[Callable[..., object], Config]) -> None:
    """A product [tokens, inputs] into a residual of 1024, and those that complete the norm of that."""
    global case
    bf16 = torch.bfloat16
    case = f"residual_linear of {tokens} tokens, 1024 rows, {config}"
    half = residual_linear(
        meta(tokens, inputs, dtype=bf16), meta(1024, inputs, dtype=bf16), None, meta(tokens, 1024, dtype=bf16),
        NextNorm(meta(1024, dtype=bf16), 1e-5, meta(1024)), config,
    )  # fmt: skip
    for call, its in following.items():
        case = f"{call.__name__} of a half norm of {tokens} tokens in {config.tiles(1024)} parts, {its}"
        call(half, meta(40960, 1024, dtype=bf16), config=its)


def launch_all() -> None:
    global case
    bf16, fp32 = torch.bfloat16, torch.float32
    launch_attention(32, 8, 128, bf16, 256, 256, 1, 0)  # many decodes: one split
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 0)  # few decodes: several splits; long prefills
    launch_attention(16, 8, 128, bf16, 8, 4, 4096, 0)  # very long prefills
    launch_attention(16, 8, 128, bf16, 256, 255, 257, 0, fixed=True)
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 4096)
    launch_attention(40, 8, 128, bf16, 8, 4, 512, -8192)
    launch_attention(15, 5, 64, bf16, 8, 4, 512, 0)
    launch_attention(32, 32, 96, bf16, 8, 4, 512, 0)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 0)
    for heads in ((4, 2, 256), (8, 8, 64), (16, 8, 128)):
        launch_attention(*heads, fp32, 8, 4, 512, 0)
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 0, torch.float8_e4m3fn)
    launch_attention(32, 8, 128, bf16, 8, 0, 4096, 0, torch.float8_e4m3fn)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 0, torch.float8_e4m3fn)
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 0, torch.int8)
    launch_attention(32, 8, 128, bf16, 8, 0, 4096, 0, torch.int8)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 0, torch.int8)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 4096, softcap=50.0)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 0, torch.int8, softcap=50.0)
    launch_attention(64, 8, 64, bf16, 8, 4, 512, 0, sinks=True)
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 128, torch.int8, sinks=True)
    launch_invariant_attention(64, 8, 64, bf16, sinks=True)
    launch_rotary_attention(64, 8, 64, bf16, norms=False, sinks=True)
    launch_invariant_attention(32, 8, 128, bf16)
    launch_invariant_attention(32, 8, 128, torch.int8)
    launch_rotary_attention(32, 8, 128, torch.int8, norms=False)
    launch_rotary_attention(16, 8, 128, bf16, norms=True)
    launch_rotary_attention(16, 8, 128, torch.float8_e4m3fn, norms=True)
    for cache_dtype in (bf16, torch.float8_e4m3fn, torch.int8):
        launch_rotary_attention(64, 8, 128, cache_dtype, norms=True)
        launch_rotary_attention(32, 32, 96, cache_dtype, norms=True)
    for heads in ((64, 8, 64), (64, 4, 128), (16, 2, 256)):
        launch_rotary_attention(*heads, bf16, norms=True)
    launch_attention(64, 4, 128, bf16, 256, 256, 1, 0)
    launch_write(32, 8, 128, bf16, norms=False)
    launch_write(16, 8, 128, torch.float8_e4m3fn, norms=True)
    launch_write(16, 8, 128, torch.int8, norms=True)
    case = "gather"
    cache, copies = meta(1024, 2, 2, 16, 8, 128, dtype=bf16), meta(2, 8192, 8, 128, dtype=bf16)
    gather_tokens(cache[:, 1, 0], cache[:, 1, 1], meta(1), 2048, copies[0], copies[1], meta(64, 512))
    pages, scales = cache.to(torch.float8_e4m3fn), meta(2, 8, dtype=fp32)
    gather_tokens(pages[:, 1, 0], pages[:, 1, 1], meta(1), 2048, copies[0], copies[1], meta(64, 512), scales)
    *pages, scales = meta_cache(torch.int8, 8, 128)
    gather_tokens(*pages, meta(1), 2048, copies[0], copies[1], meta(64, 512), scales)
    heads, sums = meta(8192, 32, 128, dtype=bf16), meta(32, 8192, dtype=fp32).t()
    merge_attention(heads, sums, heads, sums)
    launch_linear(linear, 1, VectorConfig(8, 512, 4))
    launch_linear(gated_linear, 1, VectorConfig(4, 1024, 4, 2))
    launch_linear(linear, 8, TileConfig(48, 16, 256, 3, 4))
    launch_linear(gated_linear, 64, TileConfig(64, 64, 128, 4, 4))
    launch_linear(partial_linear, 16, TileConfig(64, 16, 128, 4, 4, 4, tma=True))
    launch_residual(
        1, VectorConfig(4, 1024, 4), 2048, {linear: VectorConfig(8, 512, 2), gated_linear: VectorConfig(8, 512, 2)}
    )
    split, wide = TileConfig(64, 16, 256, 4, 4, 2, tma=True), TileConfig(64, 32, 256, 4, 4, 2, tma=True)
    launch_residual(
        16, split, 4096, {linear: TileConfig(48, 16, 256, 3, 4), gated_linear: TileConfig(112, 16, 128, 4, 4)}
    )
    launch_residual(
        32, wide, 4096, {linear: TileConfig(48, 32, 128, 6, 4), gated_linear: TileConfig(64, 32, 128, 4, 4)}
    )
    launch_linear(gated_linear, 256, TileConfig(256, 128, 64, 4, 8, tma=True))
    launch_linear(linear, 8, TileConfig(48, 16, 256, 3, 4), rows=1024)
    launch_linear(partial_linear, 8, TileConfig(64, 16, 128, 4, 4, 4, tma=True), rows=1024)
    launch_linear(gated_linear, 128, SpecializedConfig(224))
    for tokens, config in ((1, VectorConfig(4, 1024, 4)), (64, TileConfig(64, 64, 128, 4, 4)),
                           (128, SpecializedConfig(224)), (4096, PromptConfig())):  # fmt: skip
        launch_linear(partial(gated_linear, act="gelu_tanh"), tokens, config)
    launch_linear(partial_linear, 256, SpecializedConfig(256, 4))
    for tokens, dtype in ((1, bf16), (3000, bf16), (3000, fp32)):
        launch_linear(linear, tokens, invariant_config(tokens, dtype), dtype)
    rooms = attentions, mixtures, latents, inputs, drafts_and_parts, samplings, adapters, exchanges
    for name, launch in (each for room in rooms for each in room()):
        case = name
        launch()
    case = "activation"
    silu_mul(meta(256, 28672, dtype=bf16))
    case = "embedding"
    embedding(meta(256), meta(128256, 4096, dtype=bf16))
    embedding(meta(256), meta(128256, 4096, dtype=bf16), 55.5)
    case = "logits"
    cap_logits(meta(256, 128256, dtype=fp32), 1.0, 30.0)
    case = "norm"
    rms_norm(meta(256, 4096, dtype=bf16), meta(4096, dtype=bf16), 1e-5)
    add_rms_norm(meta(256, 4096, dtype=bf16), meta(256, 4096, dtype=bf16), meta(4096, dtype=bf16), 1e-5)
    weights = meta(3072, dtype=fp32), 1e-5
    rms_norm(meta(256, 3072, dtype=bf16), *weights, centred=True, bias=meta(3072, dtype=fp32))
    for parts in ((), (4,)):
        rows = meta(*parts, 64, 3840, dtype=fp32 if parts else bf16)
        add_normed(rows, meta(64, 3840, dtype=bf16), meta(3840, dtype=fp32), 1e-5, meta(3840, dtype=fp32))
    add_rms_norm(meta(8, 64, 8192, dtype=fp32), meta(64, 8192, dtype=bf16), meta(8192, dtype=bf16), 1e-5)


def launch_heads() -> None:
    """Attention of heads whose tiles are the largest, and of padded ones."""
    bf16 = torch.bfloat16
    launch_attention(32, 8, 128, bf16, 8, 4, 512, 0)
    launch_attention(16, 8, 256, bf16, 8, 4, 512, 1024, softcap=50.0)
    launch_attention(8, 4, 256, bf16, 8, 4, 512, 0, torch.int8)
    launch_attention(32, 32, 96, torch.float16, 8, 4, 512, 0)
    launch_attention(64, 4, 128, bf16, 8, 8, 1, 0)
    for heads in ((64, 8, 128), (16, 2, 256)):
        launch_rotary_attention(*heads, bf16, norms=True)


def record_launches(arch: int, launch: Callable[[], None] = launch_all) -> None:
    """Let wrappers launch for a GPU of ``arch`` with 132 multiprocessors; nothing runs."""
    pagebus.kernels.common.pdl._supported = lambda _device: arch >= 90
    compile_for(Target(arch, 132))
    JITFunction.run = record
    launch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--part")
    parser.add_argument("--heads", action="store_true")
    arguments = parser.parse_args()
    record_launches(arguments.arch, launch_heads if arguments.heads else launch_all)
    if arguments.part is not None:
        print(json.dumps(sorted({kernel.__name__ for _, kernel, _, _ in launches})))
    part, parts = map(int, (arguments.part or "1/1").split("/"))
    for launch in chosen(launches, SHARE, case_of, first=True)[part - 1 :: parts]:
        print(json.dumps(report(*launch, arch=arguments.arch)), flush=True)


if __name__ == "__main__":
    main()
