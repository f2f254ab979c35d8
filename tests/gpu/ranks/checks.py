"""What all checks of ranks share: their options, and processes that are ranks and end with the check."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pagebus.actors.executor.ranks.links import avoid_multicast
from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import to_args

Check = Callable[[argparse.Namespace], object]


def parser_of(doc: str | None, *, world: bool = True, eager: bool = True) -> argparse.ArgumentParser:
    """Options of a check; ``rank`` and ``folder`` are for its processes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if world:
        parser.add_argument("--world", type=int, default=2)
    if eager:
        parser.add_argument("--eager", action="store_true")
    parser.add_argument("--carrier", choices=("peers", "nccl", "gloo"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    return parser


def run(arguments: argparse.Namespace, run_all: Callable[[argparse.Namespace], int], run_rank: Check) -> int:
    """The whole check, or what a rank does for it."""
    if arguments.rank is None:
        return run_all(arguments)
    avoid_multicast()
    if arguments.device == "cuda":
        torch.cuda.set_device(arguments.rank % torch.cuda.device_count())
    run_rank(arguments)
    return 0


def carrier_for(arguments: argparse.Namespace, world: int) -> str:
    """What was asked for, or peer memory where each rank has a GPU of its own."""
    enough = arguments.device == "cuda" and torch.cuda.device_count() >= world
    return str(arguments.carrier or ("peers" if enough else "gloo"))


@contextmanager
def ranks_of(
    module: str, arguments: Sequence[str], folder: Path, world: int
) -> Iterator[list[subprocess.Popen[bytes]]]:  # fmt: skip
    """``python -m module arguments --folder folder --rank r`` for each rank, killed at the end of the block. What they
    print is in the files of :func:`output_of`."""
    command = [sys.executable, "-u", "-m", module, *arguments, "--folder", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=output_of(folder, rank).open("wb"), preexec_fn=die_with_parent()
        )
        for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def compile_ahead(asked: Sequence[Settings]) -> list[subprocess.Popen[bytes]]:
    """What fills Triton's cache for all of these, and all ranks of each, at once and with all cores."""
    command = [sys.executable, "-m", "pagebus.actors.commands.cli", "compile-kernels"]
    every = [settings.replace(rank=rank) for settings in asked for rank in range(settings.num_ranks)]
    return [subprocess.Popen([*command, *to_args(each)], preexec_fn=die_with_parent()) for each in every]


def wait_for(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its exit code; None if it takes longer."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def output_of(folder: Path, rank: int) -> Path:
    """The file of what a rank prints."""
    return folder / f"output-{rank}"


def lines_of(folder: Path, rank: int, mark: str) -> list[str]:
    """What a rank has printed so far in lines that begin with ``mark``."""
    whole = output_of(folder, rank).read_text(errors="replace").splitlines(keepends=True)
    return [line.removeprefix(mark).strip() for line in whole if line.startswith(mark) and line.endswith("\n")]
