"""Estimates of kernels that cut their work into programs: what a wave of them takes, and how many there are.

All programs that fit on the GPU at once are a wave. A program's share of a wave's time is the longest of these: its
weights from memory, at its share of the bandwidth or at what its loads in flight allow; weights and tokens from the L2
cache; both through shared memory; its matrix instructions. Constants that no data sheet tells are in `costs.json`,
fitted to measurements of dense products by ``python -m tests.kernels.linear.fit_costs``. Times are in microseconds.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from pagebus.kernels.common.machines import REGISTERS, Machine
from pagebus.kernels.common.resources import Resources
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig

DATA = Path(__file__).with_name("costs.json")
RESERVED = 1024
"""Bytes of shared memory that the GPU keeps for each program."""
LANES, SHARED_BYTES_PER_CLOCK = 128, 128
"""Of a multiprocessor: additions and bytes a clock."""


class Constants(NamedTuple):
    """What no data sheet tells. Microseconds:

    - ``chain``, ``late``: the product behind the norm beside it, whatever they read, with early launches and without;
    - ``start``: of each wave; ``latency``: of a load; ``splits``: to add up splits; ``counted``: to let the last
      program of a tile do so; ``norm``: what is saved with a norm; ``activation``: a kernel of its own;
    - ``ahead``: in which small weights are called into the cache before.

    Ratios:

    - ``reach``: the bandwidth of reading weights, over a copy's; ``surplus``: what one multiprocessor gets of it at
      most, over its share; ``l2``: that cache's bandwidth over the memory's;
    - ``tiles``, ``specialized``: rates of products over the library's; ``overlap``: the exponent by which two bounds
      add up;
    - ``library_chain``, ``library_reach``, ``library_rate``: the same of the library; ``library_rows``: microseconds
      for a million numbers of its result.
    """

    chain: float
    late: float
    start: float
    latency: float
    reach: float
    surplus: float
    l2: float
    tiles: float
    specialized: float
    splits: float
    counted: float
    norm: float
    ahead: float
    overlap: float
    library_chain: float
    library_reach: float
    library_rows: float
    library_rate: float
    activation: float


@cache
def constants() -> Constants:
    """Those that were fitted."""
    return Constants(**json.loads(DATA.read_text())["constants"])


class HasWarps(Protocol):
    """A launch shape of this many warps."""

    @property
    def warps(self) -> int: ...


def programs_held(config: HasWarps | SpecializedConfig, needs: Resources, machine: Machine) -> int:
    """How many programs a multiprocessor holds at once; 0: not even one."""
    its = machine.architecture
    if needs.shared > its.program_bytes:
        return 0
    if isinstance(config, SpecializedConfig):
        return 1
    num_threads = 32 * config.warps
    by_registers = REGISTERS // (max(needs.registers, 16) * num_threads)
    by_shared = its.shared_bytes // (needs.shared + RESERVED)
    return min(by_registers, by_shared, its.most_threads // num_threads, its.most_programs)


class Program(NamedTuple):
    """A program of a launch shape on a kind of GPU: ``resident`` of them are on a multiprocessor. For each of K:
    ``moved`` and ``inputs``, bytes of weights and tokens; ``wait``, microseconds at which its loads in flight come;
    ``work``, those of its matrix instructions, additions or shared memory."""

    resident: int
    moved: int
    inputs: int
    wait: float
    work: float


class Waves:
    """What programs take on one kind of GPU."""

    def __init__(self, machine: Machine, fitted: Constants) -> None:
        self.machine, self.constants = machine, fitted
        self.bandwidth = machine.bytes_per_us * fitted.reach
        self.cache = self.bandwidth * fitted.l2

    def tile_work(self, rows: int, tokens: int, *, specialized: bool) -> float:
        """`Program.work` of a tile on tensor cores; where it is narrow, shared memory bounds it."""
        machine = self.machine
        share = self.constants.specialized if specialized else self.constants.tiles
        rate = machine.flops_per_us / machine.multiprocessors * share
        return max(2.0 * rows * tokens / rate, 2.0 * (rows + 2 * tokens) / SHARED_BYTES_PER_CLOCK / machine.clock_mhz)

    def vector_work(self, rows: int, tokens: int) -> float:
        """The same without tensor cores."""
        return rows * (1.5 + 1.5 * tokens) / LANES / self.machine.clock_mhz

    def us(
        self, program: Program, count: int, part: int, sharing: float, bandwidth: float, start: float | None = None
    ) -> float:
        """Of ``count`` programs along ``part`` of K each, ``sharing`` of which read the same weights; ``start``: of
        each wave, if it is not the usual one."""
        held, begin = self.machine.multiprocessors * program.resident, self.constants.start if start is None else start
        waves, tail = divmod(count, held)
        us = begin * waves
        if waves:
            us += waves * self._wave(program, held, part, sharing, bandwidth)
        if tail:
            us += begin + self._wave(program, tail, part, sharing, bandwidth)
        return us

    def _wave(self, program: Program, active: int, part: int, sharing: float, bandwidth: float) -> float:
        """The time of ``active`` programs beside each other."""
        count = self.machine.multiprocessors
        beside = min(program.resident, -(-active // count))
        moved = program.moved * part
        crowded = max(active, count * beside / self.constants.surplus)
        memory = max(
            moved * crowded / (bandwidth * sharing),
            part * program.wait,
            (moved + program.inputs * part) * active / self.cache,
        )
        return self.overlapped(memory, part * beside * program.work)

    def overlapped(self, one: float, other: float) -> float:
        """The time of two bounds together: a little more than the larger."""
        larger, smaller = max(one, other), min(one, other)
        return larger + larger * float((smaller / larger) ** self.constants.overlap) / 4
