"""What a layer's experts take, by launch shape, as an estimate: the cost model of dense products, of as many tiles as
experts get items.

Tokens choose experts evenly and independently of each other: an expert's pairs are binomial. Programs are those of
`pagebus.kernels.linear.waves`, with its constants. What products of experts have besides is in `costs.json`: sorting,
copying and adding up pairs, and kernels that follow each other. Times are in microseconds.
"""

from __future__ import annotations

import json
from functools import cache
from math import ceil, erfc, sqrt
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from pagebus.kernels.common.machines import Machine
from pagebus.kernels.linear.waves import Program, Waves, programs_held
from pagebus.kernels.linear.waves import constants as dense_constants
from pagebus.kernels.moe.launch.candidates import Way, menu, ways
from pagebus.kernels.moe.launch.resources import needs_of
from pagebus.kernels.moe.launch.shapes import (
    Config,
    ExpertsKernel,
    GroupConfig,
    Grouped,
    PairConfig,
    ProductConfig,
    Shape,
    Specialized,
    Unsorted,
    items_of,
    kernel_of,
)
from pagebus.kernels.specialized.hopper_gemm import DEPTH, SpecializedConfig

DATA = Path(__file__).with_name("costs.json")
PAIRS_AT_ONCE = 8192
"""That a program of the sorting kernel looks at."""


class ExpertConstants(NamedTuple):
    """What no data sheet tells, beside those of dense products. Microseconds:

    - ``launch``: of each kernel behind another; ``few``: of both kernels of single pairs, beside their weights;
    - ``start``: of each wave of programs; ``turn``: of each next tile of programs that take several;
    - ``sort``: for `PAIRS_AT_ONCE` pairs.

    Ratios:

    - ``copies``: the bandwidth of copying and adding up pairs, over a copy's; ``vectors``: that of single pairs, over
      that of products;
    - ``tiles``, ``specialized``: the rate of matrix instructions, over that of dense products;
    - ``overlap``: the exponent by which two bounds add up.
    """

    launch: float
    few: float
    start: float
    turn: float
    sort: float
    copies: float
    vectors: float
    tiles: float
    specialized: float
    overlap: float


class Load(NamedTuple):
    """What some number of tokens brings on average: ``pairs``, ``hit`` experts, and their ``items``."""

    pairs: int
    hit: float
    items: float


class Candidate(NamedTuple):
    """Launch shapes and what they should take."""

    us: float
    config: Config


class _Product(NamedTuple):
    """A launch shape of one product and what it should take."""

    us: float
    config: ProductConfig


@cache
def constants() -> ExpertConstants:
    """Those that were fitted."""
    return ExpertConstants(**json.loads(DATA.read_text())["constants"])


def load_of(num_tokens: int, shape: Shape, items: int) -> Load:
    """With items of this many pairs. Beyond the first item the binomial distribution is taken as a normal one."""
    share = min(1.0, shape.top_k / shape.experts)
    hit = 1 - (1 - share) ** num_tokens
    mean, deviation = num_tokens * share, sqrt(num_tokens * share * (1 - share))
    each, begin = hit, items
    while deviation and begin < min(num_tokens, mean + 6 * deviation):
        each += erfc((begin + 0.5 - mean) / (deviation * sqrt(2))) / 2
        begin += items
    if not deviation:
        each = -(-num_tokens // items)
    return Load(num_tokens * shape.top_k, hit * shape.experts, each * shape.experts)


class ExpertCosts:
    """Answers for one kind of GPU."""

    def __init__(self, machine: Machine, fitted: ExpertConstants | None = None) -> None:
        self.machine, self.constants = machine, fitted or constants()
        dense = dense_constants()
        tiles, specialized = dense.tiles * self.constants.tiles, dense.specialized * self.constants.specialized
        self.dense = dense._replace(tiles=tiles, specialized=specialized, overlap=self.constants.overlap)
        self.waves = Waves(machine, self.dense)
        self.capability = machine.architecture.capability

    def ranked(self, num_tokens: int, shape: Shape, count: int) -> list[Candidate]:
        """The ``count`` best launch shapes with their times, the fastest first. Of each way to multiply, the best of
        both products together, and each of these with the other's second best."""
        found: list[Candidate] = []
        for way in ways(num_tokens, shape, self.capability):
            load, before = load_of(num_tokens, shape, way.items), self._besides(num_tokens, shape, way)
            gate_ups, downs = (self._products(way, shape, load, gated=gated)[:2] for gated in (True, False))
            found += [
                Candidate(before + gate_up.us + down.us, joined(way, gate_up.config, down.config))
                for gate_up in gate_ups
                for down in downs
                if gate_up is gate_ups[0] or down is downs[0]
            ]
        return sorted(found, key=attrgetter("us"))[:count]

    def own(self, num_tokens: int, shape: Shape, config: Config) -> float | None:
        """What these launch shapes take; None: this GPU does not hold them, or they were not compiled."""
        way = Way(kernel_of(config), items_of(config))
        load = load_of(num_tokens, shape, way.items)
        gate_up = self._product(way, config.gate_up, shape, load, gated=True)
        down = self._product(way, config.down, shape, load, gated=False)
        if gate_up is None or down is None:
            return None
        return self._besides(num_tokens, shape, way) + gate_up.us + down.us

    def _products(self, way: Way, shape: Shape, load: Load, *, gated: bool) -> list[_Product]:
        """All launch shapes of one product that fit, the fastest first."""
        found = (
            self._product(way, config, shape, load, gated=gated)
            for config in menu(way, shape, self.capability, gated=gated)
        )
        return sorted((each for each in found if each is not None), key=attrgetter("us"))

    def _product(self, way: Way, config: ProductConfig, shape: Shape, load: Load, *, gated: bool) -> _Product | None:
        needs = needs_of(way, config, self.capability, gated=gated)
        if needs is None or needs.spilled or not (held := programs_held(config, needs, self.machine)):
            return None
        columns, part = (shape.width, shape.hidden) if gated else (shape.hidden, shape.width)
        if isinstance(config, PairConfig):
            return _Product(self._pairs(columns, part, load, gated=gated), config)
        return _Product(self._tiles(config, columns, part, held, way.items, load, gated=gated), config)

    def _pairs(self, columns: int, part: int, load: Load, *, gated: bool) -> float:
        """Of pairs as they come, each of which reads its expert's weights from memory. Launch shapes are not told
        apart: nothing that is known of them says which was fastest. So the first of a menu is the best."""
        moved = 2.0 * (2 if gated else 1) * columns * part * load.pairs
        return self.constants.few / 2 + moved / (self.waves.bandwidth * self.constants.vectors)

    def _tiles(
        self, config: GroupConfig | SpecializedConfig, columns: int, part: int, held: int, items: int, load: Load, *,
        gated: bool,
    ) -> float:  # fmt: skip
        """Of sorted pairs. Items of an expert lie behind each other and share its weights, as far as the cache holds
        them until the next item."""
        halves = 2 if gated else 1
        specialized = isinstance(config, SpecializedConfig)
        if isinstance(config, SpecializedConfig):
            rows, columns_of_tile = config.rows, config.rows // halves
            flight = (config.stages(part) - 1) * DEPTH
        else:
            rows, columns_of_tile = config.rows * halves, config.rows
            flight = (config.stages - 1) * config.depth
        work = self.waves.tile_work(rows, items, specialized=specialized)
        program = Program(held, 2 * rows, 2 * items, self.dense.latency / max(flight, DEPTH // 2), work)
        count = ceil(load.items * -(-columns // columns_of_tile))
        kept = min(1.0, self.machine.l2_bytes / (2 * halves * columns * part))
        sharing = 1.0 + kept * max(0.0, load.items / max(load.hit, 1.0) - 1.0)
        start = self.constants.turn if specialized else self.constants.start
        return self.waves.us(program, count, part, sharing, self.waves.bandwidth, start)

    def _besides(self, num_tokens: int, shape: Shape, way: Way) -> float:
        """Kernels beside both products, and that each waits for the one before it."""
        its, copies = self.constants, self.machine.bytes_per_us * self.constants.copies
        if way.kernel is ExpertsKernel.PAIRS:
            return 0.0
        moved = 2.0 * shape.hidden * num_tokens * (shape.top_k + 1)  # pairs are read, tokens written
        us = 4 * its.launch + its.sort * num_tokens * shape.top_k / PAIRS_AT_ONCE + moved / copies
        if way.kernel is ExpertsKernel.SPECIALIZED:
            us += its.launch + 4.0 * shape.hidden * num_tokens * shape.top_k / copies
        return us


def joined(way: Way, gate_up: ProductConfig, down: ProductConfig) -> Config:
    """Launch shapes of both products."""
    if isinstance(gate_up, PairConfig) and isinstance(down, PairConfig):
        return Unsorted(gate_up, down)
    if isinstance(gate_up, GroupConfig) and isinstance(down, GroupConfig):
        return Grouped(way.items, gate_up, down)
    assert isinstance(gate_up, SpecializedConfig)
    assert isinstance(down, SpecializedConfig)
    return Specialized(way.items, gate_up, down)
