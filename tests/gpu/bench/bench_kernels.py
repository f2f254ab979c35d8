"""Times every kernel at the shapes of Llama-3.1-8B: `python -m tests.gpu.bench.bench_kernels [--sweep]`.

Each figure is the median of graph replays with one kernel call per layer, over caches larger than the L2. --sweep also
times other launch shapes of the attention kernels.
"""

from __future__ import annotations

# ruff: noqa: B023 - every closure is timed before its loop goes on
import argparse
import itertools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from pagebus.kernels.attention.cudnn_prefill import LongRow, cudnn_attention
from pagebus.kernels.attention.decode import decode_attention
from pagebus.kernels.attention.decode_plan import plan_decodes
from pagebus.kernels.attention.forms.launch import DecodeConfig, decode_config
from pagebus.kernels.attention.hopper_prefill import hopper_attention
from pagebus.kernels.attention.prefill import plan_prefills, prefill_attention
from pagebus.kernels.attention.prefill_plan import (
    PrefillConfig,
    most_merges,
    most_pieces,
    num_shares,
    prefill_config,
    query_ranges,
    query_spans,
)
from pagebus.kernels.batch.inputs import prepare_inputs, store_sampled
from pagebus.kernels.common.int8 import block_bytes, split_blocks
from pagebus.kernels.common.target import num_multiprocessors
from pagebus.kernels.layers.norm import add_rms_norm, rms_norm
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write
from pagebus.kernels.linear.activation import silu_mul
from pagebus.kernels.linear.tuning.timing import graph_microseconds
from pagebus.kernels.sampling.sampling import sample

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 32, 8, 128, 16, 32
CUDA = torch.device("cuda")


def ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


class Cache:
    """A paged cache of all layers with random contents; every row gets blocks in random order."""

    def __init__(self, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> None:
        shape = (num_blocks, LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.scales: torch.Tensor | None = None
        if dtype == torch.int8:
            size = block_bytes(LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            blocks = torch.empty((num_blocks, size), dtype=dtype, device=CUDA)
            self.data, self.scales = split_blocks(blocks, LAYERS, KV_HEADS, HEAD_DIM)
            self.scales.fill_(0.02)
        else:
            self.data = torch.empty(shape, dtype=dtype, device=CUDA)
            if dtype.itemsize == 1:
                self.scales = torch.ones(2, KV_HEADS, device=CUDA).expand(LAYERS, -1, -1)
        size = 40.0 if dtype == torch.int8 else 1.0
        for blocks in self.data.split(512):
            blocks.copy_(torch.randn(blocks.shape, dtype=torch.bfloat16, device=CUDA) * size)
        self.order = torch.randperm(num_blocks, device=CUDA, dtype=torch.int32)

    def table(self, rows: int, context: int) -> torch.Tensor:
        width = -(-context // BLOCK_SIZE)
        return self.order[: rows * width].view(rows, width).clone()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[:, index, 0], self.data[:, index, 1]

    def scales_of(self, index: int) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[index]


def decode_time(cache: Cache, lens: list[int], config: DecodeConfig) -> float:
    """What attention adds to a layer of rotary embedding, cache write and a product, its neighbours in a step: calls
    that follow each other directly take the places of each other's merges."""
    rows = len(lens)
    table, slots, context_lens = cache.table(rows, max(lens)), ints(range(rows)), ints(lens)
    qkv = torch.randn(rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=CUDA).bfloat16()
    out = torch.empty_like(qkv[:, :Q_HEADS])
    positions, last = context_lens - 1, context_lens.long() - 1
    mapping = table[slots.long(), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    angle = torch.rand(max(lens), HEAD_DIM // 2, device=CUDA)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    weight = torch.randn(Q_HEADS * HEAD_DIM, Q_HEADS * HEAD_DIM, dtype=torch.bfloat16, device=CUDA)
    plan = plan_decodes(slots, context_lens, Q_HEADS, KV_HEADS, HEAD_DIM, config, 0, settled=True)

    def layer(index: int, *, attends: bool) -> Callable[[], None]:
        (k, v), scales = cache.layer(index), cache.scales_of(index)

        def call() -> None:
            q = rotary_kv_write(qkv, positions, cos_sin, k, v, mapping, kv_scales=scales)
            if attends:
                decode_attention(q, k, v, out, table, HEAD_DIM**-0.5, 0, plan, scales)
            F.linear(out.flatten(1), weight)

        return call

    with_it, without = (
        graph_microseconds([layer(index, attends=attends) for index in range(LAYERS)]) for attends in (True, False)
    )
    return with_it - without


def library_time(lens: list[int]) -> float:
    """torch's attention of one query per row, keys and values contiguous and padded to the longest."""
    rows, longest = len(lens), max(lens)
    q = torch.randn(rows, Q_HEADS, 1, HEAD_DIM, device=CUDA).bfloat16()
    k, v = torch.randn(2, rows, KV_HEADS, longest, HEAD_DIM, dtype=torch.bfloat16, device=CUDA).unbind(0)
    mask = (torch.arange(longest, device=CUDA) < ints(lens).unsqueeze(1))[:, None, None]
    mask = None if min(lens) == longest else mask
    call = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)  # noqa: E731
    return graph_microseconds([call] * 3, replays=3)


def decode_lines(cache: Cache, sweep: bool) -> None:
    dtype = cache.data.dtype
    print(f"decode attention, 32/8 heads of 128, {str(dtype)[6:]:10}    us/layer   TB/s  torch SDPA  launch shape")
    skewed = [100 + (row * 997) % 1500 for row in range(131)]
    batches = {f"batch {rows}, context 576": [576] * rows for rows in (1, 8, 32, 64, 128, 256)}
    batches |= {
        "batch 131, context 100-1600": skewed,
        "4 of 4096 among 60 of 150": [4096] * 4 + [150] * 60,
        "batch 1, context 8192": [8192],
        "batch 8, context 8192": [8192] * 8,
        "batch 32, context 8192": [8192] * 32,
        "batch 1, context 32768": [32768],
        "batch 8, context 32768": [32768] * 8,
        "batch 1, context 131072": [131072],
    }
    shipped = decode_config(KV_HEADS, HEAD_DIM, 2, num_multiprocessors(CUDA), float8=cache.scales is not None)
    for name, lens in batches.items():
        moved = sum(lens) * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
        time, library = decode_time(cache, lens, shipped), library_time(lens)
        print(f"{name:46} {time:9.2f} {moved / time / 1e6:6.2f} {library:11.2f}  {shipped}")
        if not sweep:
            continue
        found = []
        for tile, warps, stages, programs in itertools.product((32, 64, 128), (2, 4), (2, 3), (49, 66, 132)):
            config = DecodeConfig(tile, programs, warps, stages)
            found.append((decode_time(cache, lens, config), config))
        for time, config in sorted(found, key=lambda pair: pair[0])[:4]:
            print(f"{'':46} {time:9.2f} {moved / time / 1e6:6.2f} {'':11}  {config}")


def cudnn_attention_lines(cache: Cache) -> None:
    """The kernel for long prompts and the way over torch's cuDNN attention, copies out of the pages and merging
    included."""
    print("long prefill, causal, us/layer and TF/s                kernel          library")
    for queries, context in ((2048, 2048), (4096, 4096), (8192, 8192), (2048, 32768), (8192, 32768), (8192, 131072)):
        q = torch.randn(queries, Q_HEADS, HEAD_DIM, device=CUDA).bfloat16()
        out, table, slots = torch.empty_like(q), cache.table(1, context), ints([0])
        operations = 4 * Q_HEADS * HEAD_DIM * queries * (context - queries / 2)
        rows = [LongRow(0, 0, queries, context)]
        k, v = cache.layer(1)
        line = f"{f'1 x {queries} on {context}':46}"
        for attend in (hopper_attention, cudnn_attention):
            call = lambda attend=attend: attend(q, k, v, out, slots, table, HEAD_DIM**-0.5, rows)  # noqa: E731
            time = graph_microseconds([call], replays=3)
            line += f" {time:9.1f} {operations / time / 1e6:6.0f}"
        print(line)


def prefill_time(
    cache: Cache, rows: int, queries: int, context: int, config: PrefillConfig, *, cut: bool, padded: bool = False
) -> float:
    """``padded``: with as many idle programs as a graph of that step has."""
    q = torch.randn(rows * queries, Q_HEADS, HEAD_DIM, device=CUDA).bfloat16()
    out, table, slots = torch.empty_like(q), cache.table(rows, context), ints(range(rows))
    starts, lens = ints(range(0, rows * queries + 1, queries)), ints([context] * rows)
    shares = num_shares(config, Q_HEADS, num_multiprocessors(CUDA))
    on_host = starts.cpu().numpy()
    host = query_spans(on_host, lens.cpu().numpy(), query_ranges(on_host, 0), config, shares if cut else 0)
    spans, merges = torch.from_numpy(host.spans), torch.from_numpy(host.merges)
    if padded:
        pad = torch.nn.functional.pad
        spans = pad(spans, (0, 0, 0, 32), value=-1)
        merges = pad(merges, (0, 0, 0, most_merges(shares) - len(merges)))
    plan = plan_prefills(spans.to(CUDA), merges.to(CUDA), config, Q_HEADS, HEAD_DIM, most_pieces(shares))

    def call(layer: int) -> Callable[[], None]:
        (k, v), scales = cache.layer(layer), cache.scales_of(layer)
        return lambda: prefill_attention(q, k, v, out, slots, starts, lens, table, HEAD_DIM**-0.5, 0, plan, scales)

    return graph_microseconds([call(layer) for layer in range(4)], replays=3)


def prefill_lines(cache: Cache, sweep: bool) -> None:
    print("prefill attention, causal        us/layer: keys whole  keys cut  in a graph  TF/s, cut  launch shape")
    for rows, queries, context in (
        (16, 512, 512),
        (4, 2048, 2048),
        (1, 8192, 8192),
        (1, 2048, 32768),
        (1, 8192, 32768),
        (8, 64, 4096),
        (1, 64, 15064),
        (1, 128, 32768),
        (1, 192, 32768),
        (1, 512, 32768),
        (4, 64, 8192),
        (1, 64, 131072),
    ):
        operations = 4 * Q_HEADS * HEAD_DIM * rows * queries * (context - queries / 2)
        shipped = prefill_config(queries, context, HEAD_DIM, 2)
        configs = [shipped]
        if sweep:
            configs += [
                PrefillConfig(queries_, tile, warps, stages)
                for queries_, tile, warps, stages in itertools.product((64, 128), (32, 64), (4,), (2, 3))
            ] + [PrefillConfig(128, 128, 8, 3), PrefillConfig(128, 64, 8, 3)]
        for config in dict.fromkeys(configs):
            size = cache, rows, queries, context, config
            whole, cut = prefill_time(*size, cut=False), prefill_time(*size, cut=True)
            padded = prefill_time(*size, cut=True, padded=True)
            name = f"{rows} x {queries} on {context}"
            print(f"{name:42} {whole:11.1f} {cut:9.1f} {padded:11.1f} {operations / cut / 1e6:10.0f}  {config}")


def sampling_lines() -> None:
    print("sampling                                        us")
    for rows, vocab in ((1, 128256), (32, 128256), (256, 128256), (256, 151936)):
        logits = torch.randn(rows, vocab, device=CUDA) * 3
        ones, zeros = torch.ones(rows, device=CUDA), torch.zeros(rows, dtype=torch.int32, device=CUDA)
        seeds, no_min_p = torch.arange(rows, device=CUDA), torch.zeros(rows, device=CUDA)
        for name, flags, top_k, top_p, values in (
            ("greedy, bfloat16", (False, False), 0, 1.0, logits.bfloat16()),
            ("random, bfloat16", (True, False), 0, 1.0, logits.bfloat16()),
            ("random", (True, False), 0, 1.0, logits),
            ("top_k 50, top_p 0.9", (True, True), 50, 0.9, logits),
            ("top_p 0.9", (True, True), 0, 0.9, logits),
            ("top_p 0.9, nearly flat", (True, True), 0, 0.9, logits * 0.1),
        ):
            slots, limits = ints(range(rows)), (zeros + top_k, ones * top_p, no_min_p)
            call = lambda: sample(values, slots, ones, *limits, seeds, zeros,  # noqa: E731
                                  any_random=flags[0], any_truncation=flags[1])  # fmt: skip
            print(f"{f'{rows} x {vocab}, {name}':46} {graph_microseconds([call] * 3):9.1f}")


def small_lines() -> None:
    print("others                                          us")
    for tokens in (1, 256, 8192):
        bf16 = {"dtype": torch.bfloat16, "device": CUDA}
        x, residual, weight = (
            torch.randn(tokens, 4096, **bf16),
            torch.randn(tokens, 4096, **bf16),
            torch.ones(4096, **bf16),
        )
        gated = torch.randn(tokens, 2 * 14336, **bf16)
        fused = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, **bf16)
        q = fused[:, :Q_HEADS]
        table, positions = torch.rand(4096, HEAD_DIM, device=CUDA), ints(i % 4096 for i in range(tokens))
        heads = torch.ones(HEAD_DIM, **bf16)
        cache = torch.zeros(600, 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **bf16)
        mapping = torch.randperm(9600, device=CUDA)[:tokens]
        for name, call in (
            ("silu_mul", lambda: silu_mul(gated)),
            ("add_rms_norm", lambda: add_rms_norm(x, residual, weight, 1e-5)),
            ("rms_norm of q heads", lambda: rms_norm(q, heads, 1e-5)),
            (
                "rotary_kv_write",
                lambda: rotary_kv_write(fused, positions, table, cache[:, 0, 0], cache[:, 0, 1], mapping),
            ),
        ):
            print(f"{f'{name}, {tokens} tokens':46} {graph_microseconds([call] * 20):9.2f}")
    rows = 256
    slots, starts, query_start = ints(range(rows)), ints([500] * rows), ints(range(rows + 1))
    tokens, tables = torch.zeros(rows, 1024, dtype=torch.int32, device=CUDA), ints(range(rows * 64)).view(rows, 64)
    outputs = [torch.empty(rows, dtype=torch.int32, device=CUDA) for _ in range(3)]
    mapping = torch.empty(rows, dtype=torch.int64, device=CUDA)
    call = lambda: prepare_inputs(tokens, tables, slots, starts, query_start, 16, input_ids=outputs[0],  # noqa: E731
                                  positions=outputs[1], slot_mapping=mapping, context_lens=outputs[2])  # fmt: skip
    print(f"{'prepare_inputs, 256 rows':46} {graph_microseconds([call] * 20):9.2f}")
    call = lambda: store_sampled(tokens, slots, starts, outputs[0])  # noqa: E731
    print(f"{'store_sampled, 256 rows':46} {graph_microseconds([call] * 20):9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes")
    options = parser.parse_args()
    torch.manual_seed(0)
    decode_lines(Cache(8 * 2048 + 600, torch.float8_e4m3fn), options.sweep)
    cache = Cache(8 * 2048 + 600)
    decode_lines(cache, options.sweep)
    prefill_lines(cache, options.sweep)
    cudnn_attention_lines(cache)
    sampling_lines()
    small_lines()


if __name__ == "__main__":
    main()
