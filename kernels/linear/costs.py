"""What a product takes, by launch shape, as an estimate: the cost model that answers for every shape and GPU.

All programs that fit on the GPU at once are a wave. A program's share of a wave's time is the longest of these: its
weights from memory, at its share of the bandwidth or at what its loads in flight allow; weights and tokens from the L2
cache; both through shared memory; its matrix instructions. Constants that no data sheet tells are in `costs.json`,
fitted to measurements by ``python -m tests.kernels.linear.fit_costs``. Times are in microseconds and include the norm
beside the product, as in `pagebus.kernels.linear.timing`.
"""

from __future__ import annotations

import json
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pagebus.kernels.common.machines import REGISTERS, Machine
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.linear.candidates import menu, splits_of
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.resources import Resources, resources, variant_of
from pagebus.kernels.linear.shapes import DenseConfig
from pagebus.kernels.linear.skinny_gemm import (
    PARTLY_PREFETCHED,
    PREFETCHED_BYTES,
    PREFETCHED_TOKENS,
    WHOLLY_PREFETCHED,
    TileConfig,
)
from pagebus.kernels.specialized.hopper_gemm import DEPTH, TOKENS, SpecializedConfig

DATA = Path(__file__).with_name("costs.json")
RESERVED = 1024
"""Bytes of shared memory that the GPU keeps for each program."""
LANES, SHARED_BYTES_PER_CLOCK = 128, 128
"""Of a multiprocessor: additions and bytes a clock."""
ENOUGH = 4
"""Programs for each multiprocessor from which K is not cut further."""
OUT_BYTES = {"plain": 2, "gated": 1, "wide": 4, "partial": 2, "residual": 4}
"""Written for each row of weights and token."""


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


class Shape(NamedTuple):
    """A launch shape on a kind of GPU, and what of its costs does not depend on weights. For each of K: ``moved`` and
    ``inputs``, bytes of weights and tokens; ``wait``, microseconds at which its loads in flight come; ``work``, those
    of its matrix instructions, additions or shared memory. ``resident``: programs of a multiprocessor; ``ahead``:
    whether small weights are called into the cache before; ``whole``: K must be a multiple of ``depth``."""

    config: DenseConfig
    splits: tuple[int, ...]
    depth: int
    rows: int
    tokens: int
    resident: int
    moved: int
    inputs: int
    wait: float
    work: float
    ahead: bool
    whole: bool


class Estimate(NamedTuple):
    """The launch shape that should be fastest and its time; ``library``: the library's. Microseconds."""

    config: DenseConfig | None
    us: float
    library: float


@cache
def constants() -> Constants:
    """Those that were fitted."""
    return Constants(**json.loads(DATA.read_text())["constants"])


def programs_held(config: DenseConfig, needs: Resources, machine: Machine) -> int:
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


class CostModel:
    """Answers for one kind of GPU."""

    def __init__(self, machine: Machine, fitted: Constants | None = None) -> None:
        self.machine = machine
        self.constants = fitted = fitted or constants()
        self._shapes: dict[tuple[str, int], list[Shape]] = {}
        self._bandwidth = machine.bytes_per_us * fitted.reach
        self._cache = self._bandwidth * fitted.l2
        self._begin = fitted.chain if machine.has_early_launches else fitted.late
        self._called = fitted.ahead * machine.bytes_per_us

    def shapes(self, form: str, bucket: int) -> list[Shape]:
        """All launch shapes that fit this GPU without spills."""
        if (form, bucket) not in self._shapes:
            capability = self.machine.architecture.capability
            known = resources(capability)
            found = []
            for config in menu(form, bucket, capability):
                needs = known.get(variant_of(form, bucket, config))
                if needs is not None and not needs.spilled and (held := programs_held(config, needs, self.machine)):
                    found.append(self._shape(config, form, bucket, held))
            self._shapes[form, bucket] = found
        return self._shapes[form, bucket]

    def _shape(self, config: DenseConfig, form: str, bucket: int, held: int) -> Shape:
        machine, fitted, splits = self.machine, self.constants, splits_of(form, config)
        if isinstance(config, VectorConfig):
            flight = (1 + config.ahead) * config.rows * config.depth * 2
            work = config.rows * (1.5 + 1.5 * bucket) / LANES / machine.clock_mhz
            wait = 2 * config.rows * fitted.latency / flight
            return Shape(
                config, splits, config.depth, config.rows, bucket, held, 2 * config.rows, 2 * bucket, wait, work,
                False, False,
            )  # fmt: skip
        tiles = isinstance(config, TileConfig)
        tokens, depth = (config.tokens, config.depth) if isinstance(config, TileConfig) else (TOKENS, 2 * DEPTH)
        block = next_power_of_2(config.rows) if tiles else config.rows
        ahead = tiles and machine.has_early_launches and tokens <= PREFETCHED_TOKENS
        rate = machine.flops_per_us / machine.multiprocessors * (fitted.tiles if tiles else fitted.specialized)
        work = max(
            2.0 * block * tokens / rate, 2.0 * (block + 2 * tokens) / SHARED_BYTES_PER_CLOCK / machine.clock_mhz
        )  # fmt: skip
        stages = config.stages if isinstance(config, TileConfig) else config.stages(1 << 16)
        flight = (stages - 1) * (depth if tiles else DEPTH)
        wait = fitted.latency / flight
        return Shape(
            config, splits, depth, config.rows, tokens, held, 2 * config.rows, 2 * tokens, wait, work, ahead, not tiles
        )  # fmt: skip

    def best(self, form: str, num_rows: int, num_inputs: int, bucket: int) -> Estimate:
        """The fastest launch shape for x [T, K] times weight [N, K], and the library's time."""
        ranked = self.ranked(form, num_rows, num_inputs, bucket, 1)
        library = self.library(form, num_rows, num_inputs, bucket)
        return Estimate(ranked[0][1], ranked[0][0], library) if ranked else Estimate(None, library, library)

    def ranked(
        self, form: str, num_rows: int, num_inputs: int, bucket: int, count: int
    ) -> list[tuple[float, DenseConfig]]:
        """The ``count`` best launch shapes with their times, the fastest first."""
        found = [
            (self._own(shape, splits, form, num_rows, num_inputs, bucket), shape, splits)
            for shape in self.shapes(form, bucket)
            for splits in self._divisions(shape, num_rows, num_inputs, bucket)
        ]
        found.sort(key=itemgetter(0))
        return [(us, with_splits(shape.config, splits)) for us, shape, splits in found[:count]]

    def _divisions(self, shape: Shape, num_rows: int, num_inputs: int, bucket: int) -> list[int]:
        """In how many parts K can be cut, as far as programs are still lacking."""
        tiles = -(-num_rows // shape.rows) * -(-bucket // shape.tokens)
        return [
            splits
            for splits in shape.splits
            if ((splits == 1 and not shape.whole) or num_inputs % (splits * shape.depth) == 0)
            and (splits == 1 or tiles * splits < ENOUGH * self.machine.multiprocessors)
        ]

    def own(self, config: DenseConfig, form: str, num_rows: int, num_inputs: int, bucket: int) -> float | None:
        """What a launch shape takes; None: it is not one that fits."""
        plain, splits = with_splits(config, 1), 1 if isinstance(config, VectorConfig) else config.splits
        for shape in self.shapes(form, bucket):
            if shape.config == plain:
                return self._own(shape, splits, form, num_rows, num_inputs, bucket)
        return None

    def _own(self, shape: Shape, splits: int, form: str, num_rows: int, num_inputs: int, bucket: int) -> float:
        machine, fitted = self.machine, self.constants
        token_tiles = -(-bucket // shape.tokens)
        row_tiles = -(-num_rows // shape.rows)
        part = num_inputs // splits
        waves, tail = divmod(row_tiles * token_tiles * splits, machine.multiprocessors * shape.resident)
        bandwidth = self._bandwidth
        if shape.ahead:
            bandwidth *= self._ahead(2 * shape.rows * num_inputs * row_tiles)
        us = self._begin + fitted.start * waves
        if waves:
            us += waves * self._wave(shape, machine.multiprocessors * shape.resident, part, token_tiles, bandwidth)
        if tail:
            us += fitted.start + self._wave(shape, tail, part, token_tiles, bandwidth)
        written = num_rows * bucket * OUT_BYTES[form]
        if splits > 1:
            us += fitted.counted if form == "residual" else fitted.splits
            written += 8 * num_rows * bucket * splits
        if form == "residual":
            us -= fitted.norm
        return us + written / self._cache

    def _ahead(self, weight_bytes: int) -> float:
        """How much faster weights come that were called into the cache in part."""
        if weight_bytes > PARTLY_PREFETCHED:
            return 1.0
        called = min(self._called, weight_bytes if weight_bytes <= WHOLLY_PREFETCHED else PREFETCHED_BYTES)
        return weight_bytes / max(weight_bytes - called, weight_bytes / 4)

    def _wave(self, shape: Shape, active: int, part: int, token_tiles: int, bandwidth: float) -> float:
        """The time of ``active`` programs beside each other."""
        count = self.machine.multiprocessors
        beside = min(shape.resident, -(-active // count))
        moved = shape.moved * part
        crowded = max(active, count * beside / self.constants.surplus)
        memory = max(
            moved * crowded / (bandwidth * token_tiles),
            part * shape.wait,
            (moved + shape.inputs * part) * active / self._cache,
        )
        computed = part * beside * shape.work
        larger, smaller = (memory, computed) if memory > computed else (computed, memory)
        return larger + larger * float((smaller / larger) ** self.constants.overlap) / 4

    def library(self, form: str, num_rows: int, num_inputs: int, bucket: int) -> float:
        """What cuBLAS takes, with an activation behind it."""
        machine, fitted = self.machine, self.constants
        moved = 2.0 * num_rows * num_inputs / (machine.bytes_per_us * fitted.library_reach)
        padded = -(-bucket // 64) * 64
        flops = 2.0 * num_rows * num_inputs * padded
        computed = flops / (machine.flops_per_us * fitted.library_rate)
        larger, smaller = max(moved, computed), min(moved, computed)
        us = fitted.library_chain + larger * (1 + float((smaller / larger) ** fitted.overlap) / 4)
        us += fitted.library_rows * bucket * num_rows / 1e6
        return us + fitted.activation if form == "gated" else us


def with_splits(config: DenseConfig, splits: int) -> DenseConfig:
    """The same with K in so many parts."""
    if isinstance(config, TileConfig):
        return TileConfig(
            config.rows, config.tokens, config.depth, config.stages, config.warps, splits, config.tma
        )  # fmt: skip
    return config if isinstance(config, VectorConfig) else SpecializedConfig(config.rows, splits)
