"""Latency of sums over two GPUs: ``python -m tests.gpu.ranks.bench_exchange [--seconds 100] [--large | --few]``.

Microseconds per call, back to back in a CUDA graph, the slower rank's: NCCL, torch's symmetric memory, and each of our
forms at its best of a few launches, alone and with residual and norm. Prints the table, and what ``choices.json`` would
hold. ``--large``: sums of prompts with residual and norm instead, by rows at a time and by turns, as whole calls and in
pieces of 16 MiB. ``--few``: those of decode steps, by blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed

from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.actors.executor.ranks.symmetric import SymmetricMemory
from pagebus.kernels.exchange.all_reduce import all_reduce, all_reduce_norm
from pagebus.kernels.exchange.choice import Choice
from pagebus.kernels.exchange.gather import gather
from pagebus.kernels.exchange.peers import LIMITS_OF_TWO, Limits
from pagebus.kernels.layers.norm import add_rms_norm
from tests.gpu.ranks.rank_processes import new_comm, run_ranks

KIB = (16, 1024, 4096, 64, 256, 512, 2048, 128, 8, 32, 16384, 65536)
"""The sizes with goals first."""
LIMITS = Limits(push=2 << 20, signal=8 << 20, two_shot=16 << 20)
SHAPES = ((2048, 8), (4096, 8), (8192, 16))
"""Columns of a row and warps of a block, for sums alone."""
BLOCKS = (16, 32, 64, 128)
LARGE_KIB, FEW_KIB = (65536, 16384, 8192, 32768), (256, 2048, 512, 1024, 64, 4096)
TILES, TURNS = ((1, 16), (8192, 16), (16384, 16), (16384, 8)), (1, 2, 4, 8, 16)
"""Elements at a time with warps of a block, and turns, of large sums."""
PIECE = 16 << 20
Call = Callable[[], object]
Best = dict[int, dict[str, tuple[float, Choice | None]]]


def microseconds(comm: PeerComm, call: Call, num_bytes: int) -> float:
    """Of one call among many in a graph; the slower rank's."""
    count = 40 if num_bytes <= 1 << 20 else 10
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    comm.least(0.0)
    graph.replay()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(5):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    comm.check()
    return -comm.least(-began.elapsed_time(ended) * 1e3 / count / 5)


def launches(num_bytes: int, *, norm: bool, columns: int) -> Iterator[Choice]:
    """What is worth a try at a size."""
    for form, most in zip(("push", "signal", "two_shot"), LIMITS, strict=False):
        if num_bytes > most and form != "two_shot":
            continue
        shapes = ((columns, 8), (columns, 16)) if norm else SHAPES
        for width, warps in shapes:
            rows = -(-num_bytes // 2 // width)
            if form == "two_shot":
                if rows < 2:
                    continue
                rows = -(-rows // 2)
            fitting = [blocks for blocks in BLOCKS if blocks < rows] or [BLOCKS[0]]
            more = [blocks for blocks in BLOCKS if blocks >= rows][:1]
            for blocks in dict.fromkeys([*fitting[-2:], *more]):
                yield Choice(num_bytes, form, blocks, warps, width)


class Bench:
    """All measurements of one rank; both make the same in the same order."""

    def __init__(self, comm: PeerComm, device: torch.device, store: object) -> None:
        self.comm, self.device, self.best = comm, device, {kib: {} for kib in KIB}
        self.baselines: dict[str, Callable[[int], Call]] = {}
        prefix = torch.distributed.PrefixStore
        try:
            nccl = comm._nccl
            if nccl is None:
                return
            self.baselines["nccl"] = lambda numel: partial(nccl.all_reduce, self.x(numel))
            memory, name = SymmetricMemory(64 << 20, device), f"bench-{comm.rank}"
            memory.meet(prefix("bench-memory", store), comm.rank, comm.size, name)
            symmetric, ops = memory.own.view(torch.bfloat16).zero_(), torch.ops.symm_mem
            self.memory = memory
            self.baselines["torch one"] = lambda numel: (
                lambda x=symmetric[:numel]: ops.one_shot_all_reduce(x, "sum", name)
            )
            self.baselines["torch two"] = lambda numel: (
                lambda x=symmetric[:numel]: ops.two_shot_all_reduce_(x, "sum", name)
            )
        except Exception:
            traceback.print_exc()

    best: Best

    def x(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.bfloat16, device=self.device)

    def note(self, kib: int, name: str, call: Call, choice: Choice | None = None) -> None:
        """Measure, and keep it if it is the best of its name."""
        try:
            took = microseconds(self.comm, call, kib * 1024)
        except Exception as error:
            print(f"{kib} KiB {name} {choice}: {error!r:.300}", flush=True)
            raise
        found = self.best[kib].get(name)
        if found is None or took < found[0]:
            self.best[kib][name] = took, choice

    def size(self, kib: int) -> None:
        """All of one size."""
        numel, peers = kib * 512, self.comm.peers
        x, out = self.x(numel), self.x(numel)
        for choice in launches(kib * 1024, norm=False, columns=0):
            self.note(kib, choice.form, lambda c=choice: all_reduce(x, peers, c, out), choice)
        columns = 8192 if kib >= 16 else 4096
        rows, residual = self.x(numel).view(-1, columns), self.x(numel).view(-1, columns)
        normed, weight = torch.empty_like(rows), self.x(columns)
        for choice in launches(kib * 1024, norm=True, columns=columns):
            self.note(
                kib, f"{choice.form}+norm",
                lambda c=choice: all_reduce_norm(rows, residual, weight, 1e-5, peers, 1.0, c, normed), choice,
            )  # fmt: skip
        plain = min(self.best[kib][form] for form in ("push", "signal", "two_shot") if form in self.best[kib])[1]

        def apart() -> None:
            all_reduce(x, peers, plain, out)
            add_rms_norm(out.view_as(rows), residual, weight, 1e-5)

        self.note(kib, "sum, norm apart", apart, plain)
        for name, make in self.baselines.items():
            try:
                self.note(kib, name, make(numel))
            except Exception as error:
                print(f"{kib} KiB {name}: {error!r:.300}", flush=True)

    def few(self, kib: int, columns: int) -> None:
        """Sums of decode steps with residual and norm, of one part and of two in float32; prints each at once."""
        rows, residual = self.x(kib * 512).view(-1, columns), self.x(kib * 512).view(-1, columns)
        weight, normed, peers = self.x(columns), torch.empty_like(rows), self.comm.peers
        for parts in (1, 2):
            x = rows if parts == 1 else torch.zeros((2, *rows.shape), device=self.device)
            took = {}
            for form, tile in (("push", 1), ("signal", 1), ("two_shot", 8192)):
                if kib * 1024 > getattr(LIMITS, form) or (form == "push") == (kib > 2048):
                    continue
                for blocks in BLOCKS:
                    choice = Choice(1 << 40, form, blocks, 16, columns, tile, 2)
                    run = partial(all_reduce_norm, x, residual, weight, 1e-5, peers, 1.0, choice, normed)
                    took[f"{form} {blocks}"] = microseconds(self.comm, run, kib * 1024)
            if self.comm.rank == 0:
                texts = " ".join(f"[{name}] {each:.2f}" for name, each in took.items())
                print(f"{kib} KiB, rows of {columns}, {parts} parts: {texts}", flush=True)

    def large(self, kib: int, columns: int, until: float) -> None:
        """Sums of one size with residual and norm; prints each at once, as microseconds by turns."""
        rows, residual = self.x(kib * 512).view(-1, columns), self.x(kib * 512).view(-1, columns)
        weight, normed, peers = self.x(columns), torch.empty_like(rows), self.comm.peers
        piece = PIECE // 2 // columns

        def in_pieces(choice: Choice) -> None:
            for begin in range(0, len(rows), piece):
                part = slice(begin, begin + piece)
                all_reduce_norm(rows[part], residual[part], weight, 1e-5, peers, 1.0, choice, normed[part])

        for tile, warps in TILES:
            if self.comm.least(until - time.monotonic()) < 0:
                return
            took = {}
            for turns in TURNS:
                choice = Choice(1 << 40, "two_shot", 128, warps, columns, tile, turns)
                whole = partial(all_reduce_norm, rows, residual, weight, 1e-5, peers, 1.0, choice, normed)
                took[f"{turns}"] = microseconds(self.comm, whole, kib * 1024)
                if kib * 1024 > PIECE and turns <= 2:
                    took[f"pieces, {turns}"] = microseconds(self.comm, partial(in_pieces, choice), kib * 1024)
            if self.comm.rank == 0:
                texts = " ".join(f"[{turns}] {each:.1f}" for turns, each in took.items())
                print(f"{kib} KiB, rows of {columns}, tile {tile}, {warps} warps: {texts}", flush=True)

    def gathers(self) -> None:
        """Candidates of a step."""
        for num_bytes in (64, 2048, 16384, 65536, 1 << 20):
            x = torch.zeros(num_bytes // 4, dtype=torch.int32, device=self.device)
            took = microseconds(self.comm, lambda x=x: gather(x, self.comm.peers), num_bytes)
            if self.comm.rank == 0:
                print(f"gather of {num_bytes} bytes a rank: {took:.2f} us", flush=True)

    def report(self) -> None:
        """The table, and the rows of choices."""
        names = [
            "nccl", "torch one", "torch two", "push", "signal", "two_shot", "push+norm", "signal+norm", "two_shot+norm",
            "sum, norm apart",
        ]  # fmt: skip
        print("| KiB | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
        done = sorted(kib for kib in KIB if self.best[kib])
        for kib in done:
            cells = [f"{self.best[kib][name][0]:.1f}" if name in self.best[kib] else "" for name in names]
            print(f"| {kib} | " + " | ".join(cells) + " |")
        table: dict[str, list[object]] = {"sum": [], "norm": []}
        for kind, ending in (("sum", ""), ("norm", "+norm")):
            for kib in done:
                found = [self.best[kib][form + ending] for form in ("push", "signal", "two_shot")
                         if form + ending in self.best[kib]]  # fmt: skip
                took, choice = min(found)
                assert choice is not None
                table[kind].append({**choice._asdict(), "us": round(took, 2)})
        print("CHOICES " + json.dumps(table), flush=True)


def rank_main(arguments: argparse.Namespace) -> None:
    until = time.monotonic() + arguments.seconds
    limits = LIMITS_OF_TWO if arguments.large else LIMITS
    comm = new_comm(
        arguments.rank,
        arguments.world,
        arguments.store,
        limits=limits,
        patience_s=20.0,
        nccl=not (arguments.large or arguments.few),
    )
    bench = Bench(comm, torch.device("cuda", torch.cuda.current_device()), comm._host.store)
    if comm.rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if arguments.large or arguments.few:
        for kib in LARGE_KIB if arguments.large else FEW_KIB:
            if comm.least(until - time.monotonic()) > 0 and arguments.few:
                bench.few(kib, 4096)
            elif arguments.large:
                bench.large(kib, 4096, until)
                bench.large(kib, 8192, until)
        sys.stdout.flush()
        os._exit(0)
    try:
        bench.gathers()
        for kib in KIB:
            if comm.least(until - time.monotonic()) < 0:
                print(f"time is up before {kib} KiB", flush=True)
                break
            bench.size(kib)
            if comm.rank == 0:
                found = {name: round(took, 2) for name, (took, _) in bench.best[kib].items()}
                print(f"{kib} KiB: {found}", flush=True)
    except Exception:
        traceback.print_exc()
    if comm.rank == 0:
        bench.report()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--store", default="")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--few", action="store_true")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
    codes, texts = run_ranks(
        "tests.gpu.ranks.bench_exchange",
        ["--seconds", str(arguments.seconds), *(f"--{name}" for name in ("large", "few") if getattr(arguments, name))],
        arguments.seconds + 60,
    )
    print(texts[0])
    if codes != [0, 0]:
        print(f"exit codes {codes}\n{texts[1][-3000:]}")


if __name__ == "__main__":
    main()
