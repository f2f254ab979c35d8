"""Processes of ranks with a GPU each, or all on one, where they take turns; killed when their time is up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from pagebus.actors.executor.ranks.gloo import GlooComm, open_store
from pagebus.actors.executor.ranks.nccl import NcclComm
from pagebus.actors.executor.ranks.peers import PeerComm
from pagebus.kernels.exchange.peers import Limits

ROOT = Path(__file__).parents[3]
WORLD = 2


def run_ranks(module: str, arguments: Sequence[str], limit_s: float, world: int = WORLD) -> tuple[list[int], list[str]]:
    """Run ``python -m module --rank r --world N --store S arguments`` for each rank. Returns exit codes, -9 where time
    was up, and all they printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    if torch.cuda.device_count() < world:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, "-u", "-m", module, "--world", str(world), "--store", f"file:{folder}/store"]
        files = [Path(folder, f"rank-{rank}") for rank in range(world)]
        children = [
            subprocess.Popen(
                [*base, "--rank", str(rank), *arguments],
                stdout=file.open("wb"),
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
            )
            for rank, file in enumerate(files)
        ]
        try:
            while any(child.poll() is None for child in children) and time.monotonic() < until:
                time.sleep(0.05)
                if any(child.poll() not in {None, 0} for child in children):
                    until = min(until, time.monotonic() + 5.0)  # the others wait for one that has failed
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        return [child.returncode for child in children], [file.read_text(errors="replace") for file in files]


def new_comm(
    rank: int, world: int, store: str, *, limits: Limits | None = None, patience_s: float = 10.0,
    nccl: bool = False,
) -> PeerComm:  # fmt: skip
    """A rank that has met the others, on the GPU of its number or on the only one."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    host = GlooComm(rank, world, partial(open_store, store, rank, world), "127.0.0.1", 120.0)
    comm = PeerComm(host, device, limits, patience_s, NcclComm(host, device) if nccl else None)
    comm.connect()
    return comm
