"""Times attention over latents in CUDA graphs beside its floor: ``python -m tests.gpu.latent.bench_latent``.

Decodes: the bytes of all latents at 4.30 TB/s, or the operations at 790 TFLOP/s, whichever takes longer. Prompts: the
same rows over latents and expanded, in TFLOP/s of what the second takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import Spans, cut_prompts, plan_attention
from pagebus.kernels.common.target import num_multiprocessors
from pagebus.kernels.latent.attention import latent_attention
from pagebus.kernels.latent.expanded import expanded_attention
from pagebus.kernels.latent.head_product import head_product
from tests.gpu.latent.test_latent_kernels import V2_LITE, V3
from tests.kernels.latent.latent_cases import LatentCase, make_latents
from tests.kernels.latent.test_latent_attention import shape_of

BYTES_PER_S, FLOPS_PER_S, REPEATS = 4.30e12, 790e12, 20


def microseconds(work: Callable[[], object]) -> float:
    """Of one call, from a graph of several."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


def decodes(name: str, sizes: dict[str, int], batch: int, context: int) -> None:
    case = make_latents([context] * batch, [1] * batch, **sizes, dtype=torch.bfloat16, device="cuda")
    shape, q, rows = shape_of(case), case.absorbed, case.rows
    plan = plan_attention(rows["slots"], rows["context_lens"], shape)
    took = microseconds(lambda: latent_attention(q, case.q[..., case.nope :], case.cache, **rows, plan=plan))
    entries = batch * context
    moved = entries * case.cache.shape[2] * 2 / BYTES_PER_S
    multiplied = entries * sizes["heads"] * 2 * (2 * sizes["rank"] + sizes["rope"]) / FLOPS_PER_S
    floor = max(moved, multiplied) * 1e6
    expansion = case.expansion[:, : case.nope]
    absorbing = microseconds(lambda: head_product(case.q[..., : case.nope], expansion))
    print(
        f"{name:8} {batch:4} x {context:6}: floor {floor:8.1f} us, took {took:8.1f} ({floor / took:4.0%}), "
        f"absorbing {absorbing:6.1f}",
        flush=True,
    )


def prompts(name: str, sizes: dict[str, int], rows: int, count: int, past: int) -> None:
    case = make_latents([count + past] * rows, [count] * rows, **sizes, dtype=torch.bfloat16, device="cuda")
    shape, device = shape_of(case), case.q.device
    lens = case.rows["query_start"].cpu().numpy(), case.rows["context_lens"].cpu().numpy()
    spans = Spans.copied(cut_prompts(*lens, 0, shape, device), device)
    plan = plan_attention(case.rows["slots"][:0], case.rows["context_lens"][:0], shape, spans)
    absorbed = absorbed_us(case, plan)
    out = case.q.new_empty(len(case.q), sizes["heads"], sizes["value"])
    arguments = {key: case.rows[key] for key in ("slots", "block_tables", "scale")}
    long_rows = [LongRow(row, row * count, count, count + past) for row in range(rows)]
    expanded = microseconds(
        lambda: expanded_attention(case.q, case.cache, case.expansion, out, **arguments, rows=long_rows)
    )
    pairs = rows * (count * past + count * count / 2)
    flops = pairs * 2 * sizes["heads"] * (sizes["nope"] + sizes["rope"] + sizes["value"])
    flops += rows * (count + past) * 2 * sizes["heads"] * sizes["rank"] * (sizes["nope"] + sizes["value"])
    print(
        f"{name:8} {rows:3} prompts of {count:5} behind {past:6}: absorbed {absorbed:9.1f} us, expanded "
        f"{expanded:9.1f} us ({flops / expanded / 1e6:4.0f} TFLOP/s)",
        flush=True,
    )


def absorbed_us(case: LatentCase, plan: object) -> float:
    """Both products with the expansion included."""
    first, second = case.expansion[:, : case.nope], case.expansion[:, case.nope :].transpose(1, 2)

    def work() -> None:
        q = head_product(case.q[..., : case.nope], first)
        attended = latent_attention(q, case.q[..., case.nope :], case.cache, **case.rows, plan=plan)
        head_product(attended, second)

    return microseconds(work)


def main() -> None:
    print(f"{num_multiprocessors(torch.device('cuda', 0))} multiprocessors", flush=True)
    for batch, context in ((1, 576), (1, 16384), (32, 576), (64, 4096), (256, 576), (256, 2048)):
        decodes("v2-lite", V2_LITE, batch, context)
    for batch, context in ((1, 4096), (32, 4096)):
        decodes("v3", V3, batch, context)
    for rows, count, past in (
        (8, 512, 0),
        (1, 4096, 0),
        (1, 4096, 12288),
        (1, 128, 8192),
        (1, 170, 8192),
        (1, 256, 8192),
    ):
        prompts("v2-lite", V2_LITE, rows, count, past)


if __name__ == "__main__":
    main()
