"""What ranks exchange on GPUs, checked by each rank: ``python -m tests.gpu.ranks.exchange_cases --rank 0 ...``."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
import zlib
from collections.abc import Callable

import pytest
import torch

from pagebus.actors.executor.device.errors import EngineStalled
from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.kernels.exchange.all_reduce import (
    all_reduce,
    all_reduce_norm,
    all_reduce_norm_reference,
    all_reduce_reference,
)
from pagebus.kernels.exchange.choice import Choice
from pagebus.kernels.exchange.gather import gather
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.sampling.limits import sampling_cuts
from pagebus.kernels.sampling.rank_limits import RowLimits, rank_cuts
from tests.gpu.ranks.rank_processes import new_comm

FORMS = {"push": 512 * 1024, "signal": 4 * 1024 * 1024, "two_shot": 16 * 1024 * 1024}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ODD = (1, 7, 129, 4096, 8191, 65537, 1000003)


def parts(comm: PeerComm, seed: int, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x of all ranks, which each can make for itself."""
    made = []
    for rank in range(comm.size):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
        made.append(torch.randn(shape, generator=generator, device="cuda").to(dtype))
    return made


def same_everywhere(comm: PeerComm, x: torch.Tensor) -> None:
    digest = zlib.crc32(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    told = comm.all_gather(torch.tensor([digest]))
    assert bool((told == told[0]).all()), f"ranks differ: {told.tolist()}"


def choice(form: str, blocks: int = 64, columns: int = 2048) -> Choice:
    return Choice(1 << 40, form, blocks, 8, columns)


def sums(comm: PeerComm) -> None:
    """All forms, formats, odd sizes, and the table's own choice; against float64 and bit by bit."""
    seed = 0
    for form in (*FORMS, None):
        for dtype in DTYPES:
            for numel in (*ODD, 20_000_001):
                if form and numel * dtype.itemsize > FORMS[form]:
                    continue
                seed += 1
                xs = parts(comm, seed, numel, dtype=dtype)
                out = all_reduce(xs[comm.rank], comm.peers, choice(form, (seed % 3 + 1) * 40) if form else None)
                exact = torch.stack(xs).double().sum(0)
                torch.testing.assert_close(out, exact.to(dtype), rtol=1e-2, atol=1e-2)
                assert torch.equal(out, all_reduce_reference(xs)), f"{form} {dtype} {numel}"
                same_everywhere(comm, out)


def norms(comm: PeerComm) -> None:
    """All forms, formats, widths and counts of rows; parts in float32; a strided residual."""
    seed = 500
    for form in (*FORMS, None):
        for dtype in DTYPES:
            for rows, columns in ((1, 8192), (3, 4096), (17, 5120), (64, 1111), (130, 2048), (5000, 8192)):
                if form and rows * columns * dtype.itemsize > FORMS[form]:
                    continue
                for count in (1, 3):
                    seed += 1
                    shape = (rows, columns) if count == 1 else (count, rows, columns)
                    xs = parts(comm, seed, *shape, dtype=dtype if count == 1 else torch.float32)
                    weight = parts(comm, seed + 7777, columns, dtype=dtype if seed % 2 else torch.float32)[0]
                    base = parts(comm, seed + 8888, rows, columns + 16, dtype=dtype)[0]
                    mine, theirs = base.clone()[:, :columns], base.clone()[:, :columns]
                    out = all_reduce_norm(
                        xs[comm.rank], mine, weight, 1e-5, comm.peers, 0.5 if seed % 3 == 0 else 1.0,
                        choice(form, 100) if form else None,
                    )  # fmt: skip
                    expected = all_reduce_norm_reference(xs, theirs, weight, 1e-5, 0.5 if seed % 3 == 0 else 1.0)
                    bound = 2e-2 if dtype != torch.float32 else 1e-5
                    torch.testing.assert_close(mine, theirs, rtol=bound if count > 1 else 0, atol=bound * (count > 1))
                    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
                    same_everywhere(comm, mine)
                    same_everywhere(comm, out)


def large(comm: PeerComm) -> None:
    """Sums of prompts, with residual and norm and without, whole and in pieces, some ranks late."""
    draw = random.Random(comm.rank)
    for seed, (rows, columns) in enumerate(((8192, 4096), (9001, 8192), (601, 4096), (3003, 8192), (1555, 4096))):
        xs = parts(comm, 6000 + seed, rows, columns, dtype=torch.bfloat16)
        base = parts(comm, 6100 + seed, rows, columns, dtype=torch.bfloat16)[0]
        weight = parts(comm, 6200 + seed, columns, dtype=torch.bfloat16)[0]
        expected_residual, residual = base.clone(), base.clone()
        expected = all_reduce_norm_reference(xs, expected_residual, weight, 1e-5)
        for _ in range(5):
            residual.copy_(base)
            torch.cuda._sleep(draw.randrange(2_000_000))
            out = all_reduce_norm(xs[comm.rank], residual, weight, 1e-5, comm.peers)
            assert torch.equal(residual, expected_residual), f"{rows} rows of {columns}"
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            same_everywhere(comm, out)
            total = all_reduce(xs[comm.rank], comm.peers)
            assert torch.equal(total, all_reduce_reference(xs)), f"{rows} rows of {columns}, without norm"


def gathers(comm: PeerComm) -> None:
    for seed, (dtype, numel) in enumerate(
        (dtype, numel) for dtype in (torch.int32, torch.uint8, torch.int64) for numel in (1, 5, 1000, 70_001, 3_000_000)
    ):
        xs = [(part * 1000).to(dtype) for part in parts(comm, 4000 + seed, numel, dtype=torch.float32)]
        assert torch.equal(gather(xs[comm.rank], comm.peers), torch.stack(xs)), f"{dtype} {numel}"


def rows(comm: PeerComm) -> None:
    """Rows that the device chooses, of widths that differ: none, some, all, and more than a call tells."""
    for seed, (count, columns) in enumerate(((1, 128256), (40, 128256), (7, 1001), (300, 4999))):
        widths = [(rank + 1) * columns // comm.size - rank * columns // comm.size for rank in range(comm.size)]
        whole = parts(comm, 5000 + seed, count, columns, dtype=torch.float32)[0]
        mine = whole.split(widths, dim=1)[comm.rank]
        for share in (0.0, 0.3, 1.0):
            wanted = (parts(comm, 5100 + seed, count, dtype=torch.float32)[0].abs() < 4 * share).int()
            found = comm.gather_rows(mine, wanted, widths)
            assert torch.equal(found[wanted != 0], whole[wanted != 0]), f"{count} rows of {columns}, {share}"


def limits(comm: PeerComm) -> None:
    """The thresholds of top-k, top-p and min-p from the ranks' candidates, beside those of all logits."""
    for seed, (count, vocab, scale) in enumerate(
        ((1, 128256, 3.0), (32, 128256, 2.0), (32, 50257, 0.01), (256, 32000, 4.0))
    ):
        heat, top_p, min_p = (parts(comm, 5200 + 9 * seed + i, count, dtype=torch.float32)[0].abs() for i in range(3))
        slots = torch.arange(count, dtype=torch.int32, device="cuda")
        top_k = torch.where(slots % 3 == 1, slots % 100 + 1, 0)
        given = slots, heat + 0.1, top_k, top_p.clamp(0.01, 1.0), torch.where(slots % 4 == 2, min_p * 0.1, 0.0)
        whole = parts(comm, 5300 + seed, count, vocab, dtype=torch.float32)[0] * scale
        widths = [(rank + 1) * vocab // comm.size - rank * vocab // comm.size for rank in range(comm.size)]
        mine = whole.split(widths, dim=1)[comm.rank].contiguous()
        cuts = rank_cuts(
            mine, RowLimits(*given), vocab, comm.all_gather, lambda x, wanted, w=widths: comm.gather_rows(x, wanted, w)
        )
        same_everywhere(comm, cuts)
        kept, expected = ((whole >= each.unsqueeze(1)).sum(1) for each in (cuts, sampling_cuts(whole, *given, 1e-5)))
        differing = int((kept != expected).sum())
        assert differing <= count // 16, f"{differing} of {count} rows"  # sums of others may round at an edge
        torch.testing.assert_close(kept.float(), expected.float(), rtol=2e-3, atol=1)


def interface(comm: PeerComm) -> None:
    """What an engine calls."""
    x, residual = parts(comm, 1, 5, 4096, dtype=torch.bfloat16), parts(comm, 2, 5, 4096, dtype=torch.bfloat16)[0]
    weight = parts(comm, 3, 4096, dtype=torch.bfloat16)[0]
    expected_residual = residual.clone()
    expected = all_reduce_norm_reference(x, expected_residual, weight, 1e-6)
    unusual = residual.clone()
    normed = comm.all_reduce_norm(add_rms_norm, x[comm.rank].clone(), residual, weight, 1e-6, centred=False, bias=None)
    assert isinstance(normed, torch.Tensor)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(normed, expected, rtol=2e-2, atol=2e-2)
    comm.all_reduce_norm(add_rms_norm, x[comm.rank].clone(), unusual, weight, 1e-6, centred=True)
    assert torch.equal(unusual, expected_residual)
    assert torch.equal(comm.all_reduce(x[comm.rank].clone()), all_reduce_reference(x))
    halves = parts(comm, 5, 3, 100, dtype=torch.float32)
    assert torch.equal(comm.gather_columns(halves[comm.rank], [100] * comm.size), torch.cat(halves, dim=1))
    assert comm.least(float(comm.rank)) == 0.0


def late(comm: PeerComm) -> None:
    """Ranks that are late by turns."""
    draw = random.Random(comm.rank)
    for seed in range(200):
        torch.cuda._sleep(draw.randrange(200_000))
        form = ("push", "signal", "two_shot")[seed % 3]
        xs = parts(comm, 9000 + seed, 1 + 997 * seed % 100_000, dtype=torch.bfloat16)
        torch.cuda._sleep(draw.randrange(200_000))
        chosen = choice(form, 3)._replace(tile=4096, turns=1 + seed % 16) if form == "two_shot" else choice(form)
        assert torch.equal(all_reduce(xs[comm.rank], comm.peers, chosen), all_reduce_reference(xs))


class Replayed:
    """A graph of sums and gathering of several sizes and forms, which counts its own errors on the device."""

    def __init__(self, comm: PeerComm) -> None:
        self.comm, self.errors = comm, torch.zeros((), dtype=torch.int64, device="cuda")
        self.turn = torch.zeros((), dtype=torch.float32, device="cuda")
        self.bases = [parts(comm, 70 + index, numel, dtype=torch.float32) for index, numel in enumerate((8192, 777))]
        self.residual = torch.zeros((4, 2048), dtype=torch.bfloat16, device="cuda")
        self.weight = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
        self.body()  # compiles
        torch.cuda.synchronize()
        self.graph, unused = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph in (unused, self.graph):  # one is captured and never runs
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.body()

    def body(self) -> None:
        self.turn.copy_((self.turn + 1) % 251)
        for index, form in ((0, "push"), (1, "signal"), (0, "two_shot"), (1, "push")):
            xs = [(base + self.turn).bfloat16() for base in self.bases[index]]
            out = all_reduce(xs[self.comm.rank], self.comm.peers, choice(form, 8 + 8 * index, 512))
            self.errors += (out != all_reduce_reference(xs)).any()
        words = [(base[:33] + self.turn).to(torch.int32) for base in self.bases[0]]
        self.errors += (gather(words[self.comm.rank], self.comm.peers) != torch.stack(words)).any()
        rows = [(base + self.turn).bfloat16().view(4, 2048) for base in self.bases[0]]
        self.residual.zero_()
        all_reduce_norm(rows[self.comm.rank], self.residual, self.weight, 1e-5, self.comm.peers)
        self.errors += (self.residual != all_reduce_reference(rows)).any()


def replays(comm: PeerComm, count: int) -> None:
    """A graph again and again, with eager calls in between."""
    replayed = Replayed(comm)
    for index in range(count):
        replayed.graph.replay()
        if index % 97 == 0:
            replayed.body()
        if index % 1000 == 999:
            torch.cuda.synchronize()
            comm.check()
    torch.cuda.synchronize()
    comm.check()
    assert int(replayed.errors) == 0, f"{int(replayed.errors)} errors"


def bare_replays(comm: PeerComm, count: int) -> None:
    """Nothing but exchanges, one behind the other, at full speed; the last result is checked."""
    xs = parts(comm, 31, 16, 4096, dtype=torch.bfloat16)
    outs = [torch.empty_like(xs[0]) for _ in range(3)]
    forms = ("push", "signal", "two_shot")
    for form, out in zip(forms, outs, strict=True):
        all_reduce(xs[comm.rank], comm.peers, choice(form, 16), out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for form, out in zip(forms, outs, strict=True):
            all_reduce(xs[comm.rank], comm.peers, choice(form, 16), out)
    for index in range(count):
        graph.replay()
        if index % 10_000 == 9_999:
            torch.cuda.synchronize()
            comm.check()
    torch.cuda.synchronize()
    comm.check()
    for out in outs:
        assert torch.equal(out, all_reduce_reference(xs))


def missing(comm: PeerComm) -> None:
    """A rank that never comes: the wait ends, names it, and no later one waits. The last of all cases."""
    x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    if comm.rank == 0:
        all_reduce(x, comm.peers, choice("signal", 1))
        torch.cuda.synchronize()
        with pytest.raises(EngineStalled, match="for rank 1"):
            comm.check()
        began = time.monotonic()
        for form in FORMS:
            all_reduce(x, comm.peers, choice(form, 1))
        gather(x, comm.peers)
        torch.cuda.synchronize()
        assert time.monotonic() - began < 0.9 * comm.peers.patience_ns / 1e9 + 20
    comm.least(0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--cases", default="sums,norms,large,gathers,rows,limits,interface,late,replays,bare,missing")
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--bare", type=int, default=33_334)
    parser.add_argument("--patience", type=float, default=10.0)
    arguments = parser.parse_args()
    cases: dict[str, Callable[[PeerComm], None]] = {
        "sums": sums, "norms": norms, "large": large, "gathers": gathers, "rows": rows, "limits": limits,
        "interface": interface, "late": late, "missing": missing,
        "replays": lambda comm: replays(comm, arguments.replays),
        "bare": lambda comm: bare_replays(comm, arguments.bare),
    }  # fmt: skip
    began = time.monotonic()
    comm = new_comm(arguments.rank, arguments.world, arguments.store, patience_s=arguments.patience)
    print(f"connected in {time.monotonic() - began:.2f} s", flush=True)
    for name in arguments.cases.split(","):
        began = time.monotonic()
        try:
            cases[name](comm)
            torch.cuda.synchronize()
            if name != "missing":
                comm.check()
        except Exception:
            traceback.print_exc()
            print(f"{name}: FAILED after {time.monotonic() - began:.2f} s; note {comm._note.tolist()}", flush=True)
            sys.stdout.flush()
            os._exit(1)
        print(f"{name}: passed in {time.monotonic() - began:.2f} s", flush=True)
    os._exit(0)  # never a clean-up that waits for the device


if __name__ == "__main__":
    main()
