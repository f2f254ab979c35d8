"""What a product takes, by launch shape, as an estimate: the cost model that answers for every shape and GPU.

Estimates are sums of waves of programs (`pagebus.kernels.linear.waves`), in microseconds. They include the norm beside
the product, as in `pagebus.kernels.linear.tuning.timing`.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from pagebus.kernels.common.machines import Machine
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.linear.candidates import menu, splits_of
from pagebus.kernels.linear.epilogue import (
    PARTLY_PREFETCHED,
    PREFETCHED_BYTES,
    PREFETCHED_TOKENS,
    WHOLLY_PREFETCHED,
)
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.resources import resources, variant_of
from pagebus.kernels.linear.shapes import DenseConfig
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.waves import Constants, Program, Waves, constants, programs_held
from pagebus.kernels.specialized.hopper_gemm import DEPTH, TOKENS, SpecializedConfig

ENOUGH = 4
"""Programs for each multiprocessor from which K is not cut further."""
OUT_BYTES = {"plain": 2, "gated": 1, "wide": 4, "partial": 2, "residual": 4}
"""Written for each row of weights and token."""


class Shape(NamedTuple):
    """A launch shape on a kind of GPU, and what of its costs does not depend on weights. ``ahead``: whether small
    weights are called into the cache before; ``whole``: K must be a multiple of ``depth``."""

    config: DenseConfig
    splits: tuple[int, ...]
    depth: int
    rows: int
    tokens: int
    program: Program
    ahead: bool
    whole: bool


class Estimate(NamedTuple):
    """The launch shape that should be fastest and its time; ``library``: the library's. Microseconds."""

    config: DenseConfig | None
    us: float
    library: float


class CostModel:
    """Answers for one kind of GPU."""

    def __init__(self, machine: Machine, fitted: Constants | None = None) -> None:
        self.machine = machine
        self.constants = fitted = fitted or constants()
        self._shapes: dict[tuple[str, int], list[Shape]] = {}
        self.waves = Waves(machine, fitted)
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
        fitted, splits, waves = self.constants, splits_of(form, config), self.waves
        if isinstance(config, VectorConfig):
            flight = (1 + config.ahead) * config.rows * config.depth * 2
            wait = 2 * config.rows * fitted.latency / flight
            program = Program(held, 2 * config.rows, 2 * bucket, wait, waves.vector_work(config.rows, bucket))
            return Shape(config, splits, config.depth, config.rows, bucket, program, False, False)
        tiles = isinstance(config, TileConfig)
        tokens, depth = (config.tokens, config.depth) if isinstance(config, TileConfig) else (TOKENS, 2 * DEPTH)
        block = next_power_of_2(config.rows) if tiles else config.rows
        ahead = tiles and self.machine.has_early_launches and tokens <= PREFETCHED_TOKENS
        stages = config.stages if isinstance(config, TileConfig) else config.stages(1 << 16)
        wait = fitted.latency / ((stages - 1) * (depth if tiles else DEPTH))
        work = waves.tile_work(block, tokens, specialized=not tiles)
        program = Program(held, 2 * config.rows, 2 * tokens, wait, work)
        return Shape(config, splits, depth, config.rows, tokens, program, ahead, not tiles)

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
            if _fits(shape, splits, num_inputs)
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
        fitted, waves = self.constants, self.waves
        token_tiles = -(-bucket // shape.tokens)
        row_tiles = -(-num_rows // shape.rows)
        bandwidth = waves.bandwidth
        if shape.ahead:
            bandwidth *= self._ahead(2 * shape.rows * num_inputs * row_tiles)
        programs, part = row_tiles * token_tiles * splits, num_inputs // splits
        us = self._begin + waves.us(shape.program, programs, part, token_tiles, bandwidth)
        written = num_rows * bucket * OUT_BYTES[form]
        if splits > 1:
            us += fitted.counted if form == "residual" else fitted.splits
            written += 8 * num_rows * bucket * splits
        if form == "residual":
            us -= fitted.norm
        return us + written / waves.cache

    def _ahead(self, weight_bytes: int) -> float:
        """How much faster weights come that were called into the cache in part."""
        if weight_bytes > PARTLY_PREFETCHED:
            return 1.0
        called = min(self._called, weight_bytes if weight_bytes <= WHOLLY_PREFETCHED else PREFETCHED_BYTES)
        return weight_bytes / max(weight_bytes - called, weight_bytes / 4)

    def library(self, form: str, num_rows: int, num_inputs: int, bucket: int) -> float:
        """What cuBLAS takes, with an activation behind it."""
        machine, fitted = self.machine, self.constants
        moved = 2.0 * num_rows * num_inputs / (machine.bytes_per_us * fitted.library_reach)
        padded = -(-bucket // 64) * 64
        flops = 2.0 * num_rows * num_inputs * padded
        computed = flops / (machine.flops_per_us * fitted.library_rate)
        us = fitted.library_chain + self.waves.overlapped(moved, computed)
        us += fitted.library_rows * bucket * num_rows / 1e6
        return us + fitted.activation if form == "gated" else us


def _fits(shape: Shape, splits: int, num_inputs: int) -> bool:
    """Whether K can be cut into this many parts; of one part any, unless tiles are of whole depths."""
    config = with_splits(shape.config, splits)
    if isinstance(config, TileConfig) and config.tma:
        return config.fits(num_inputs)
    return (splits == 1 and not shape.whole) or num_inputs % (splits * shape.depth) == 0


def with_splits(config: DenseConfig, splits: int) -> DenseConfig:
    """The same with K in this many parts."""
    if isinstance(config, TileConfig):
        return TileConfig(
            config.rows, config.tokens, config.depth, config.stages, config.warps, splits, config.tma
        )  # fmt: skip
    return config if isinstance(config, VectorConfig) else SpecializedConfig(config.rows, splits)
