"""What a product with a quantized weight takes, by launch shape, as an estimate.

Programs go through the same waves as those of dense products (`pagebus.kernels.linear.waves`), with the same constants.
A number is fewer bytes, and its conversion takes instructions: the constants below are what an H200 took for the
products of Llama-8B (`docs/measurements/h200-quantized/trial_fp8.txt`, `trial_words.txt`). Hopper's kernel that widens
words has an estimate of its own, from steps that were timed.
"""

from __future__ import annotations

from operator import itemgetter

from pagebus.kernels.common.machines import Machine, machine_of
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import SPLIT_FORMS, Config, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.waves import LANES, SHARED_BYTES_PER_CLOCK, Program, Waves, constants, programs_held
from pagebus.kernels.quantized.candidates import CodedVariant, menu, resources
from pagebus.kernels.quantized.coding import DEPTH, Kind
from pagebus.kernels.quantized.word_choice import widening_configs, widening_us
from pagebus.kernels.specialized.hopper_words import WideningConfig

BEGIN_US, ROUNDING_US, SPLITS_US = 1.9, 1.5, 0.1
"""Before and behind all programs, of the launch that rounds tokens, and of sums of parts of K."""
CONVERSIONS = {True: 3.3, False: 4.5}
"""Instructions of a thread for a number that is in words, or in a byte, with what stands around them."""
VECTOR_INSTRUCTIONS = 1.5
"""The same of one token without tensor cores."""
STEP_US, DEEP_STEP_US = 0.45, 0.48
"""That a step of K adds, from the arrival of its numbers to the end of its products: of numbers that are converted, and
of several tiles of words at once. Of 8 bits that are multiplied as they are, nothing was found."""
RATE = 0.66
"""Of matrix instructions whose numbers come from registers, over that of dense products."""
SPLITS, LEAST_PART = (1, 2, 4, 8), 1024
ENOUGH = 4
"""Programs for each multiprocessor from which K is not cut further."""

Estimate = tuple[float, Config]
"""Microseconds of a launch shape."""


class QuantizedCosts:
    """Estimates for one kind of GPU; of layouts that were not compiled ahead for it there are none."""

    def __init__(self, target: Target) -> None:
        self.machine: Machine = machine_of(target)
        self._target, self._waves = target, Waves(self.machine, constants())

    def ranked(self, product: Product, tokens: int, kind: Kind, count: int) -> list[Estimate]:
        """The ``count`` best launch shapes that neither spill nor exceed shared memory, the fastest first."""
        found: list[Estimate] = []
        for config in menu(tokens, kind):
            for splits in _splits_of(product, config, tokens, ENOUGH * self.machine.multiprocessors):
                whole = config if isinstance(config, VectorConfig) else with_splits(config, splits)
                us = self.own(product, tokens, kind, whole)
                if us is not None:
                    found.append((us, whole))
        found += [
            (widening_us(config, product, tokens, self._target), config)
            for config in widening_configs(product, tokens, kind, self._target)
        ]
        return sorted(found, key=itemgetter(0))[:count]

    def own(self, product: Product, tokens: int, kind: Kind, config: Config) -> float | None:
        """What a launch shape takes; None: nothing is known of it, or it does not fit."""
        if isinstance(config, WideningConfig):
            return widening_us(config, product, tokens, self._target)
        if not isinstance(config, TileConfig | VectorConfig):
            return None
        plain = config if isinstance(config, VectorConfig) else with_splits(config, 1)
        variant = CodedVariant(kind.name, product.form == "gated", plain)
        needs = resources(self.machine.architecture.capability).get(variant)
        if needs is None or needs.spilled or not (held := programs_held(config, needs, self.machine)):
            return None
        return self._us(product, tokens, kind, config, held)

    def _us(self, product: Product, tokens: int, kind: Kind, config: TileConfig | VectorConfig, held: int) -> float:
        tiles = config if isinstance(config, TileConfig) else None
        width, splits = (tiles.tokens, tiles.splits) if tiles else (1, 1)
        token_tiles, part = -(-tokens // width), product.inputs // splits
        programs = config.tiles(product.rows) * token_tiles * splits
        program = self._program(kind, config, held)
        us = BEGIN_US + self._waves.us(program, programs, part, token_tiles, self._waves.bandwidth)
        if tiles is None:
            return us
        resident = self.machine.multiprocessors * held
        step = 0.0 if tiles.rounded else DEEP_STEP_US if tiles.depth > DEPTH else STEP_US
        us += step * -(-part // tiles.depth) * max(1.0, programs / resident)
        us += (ROUNDING_US if tiles.rounded else 0.0) + (SPLITS_US * splits if splits > 1 else 0.0)
        written = product.rows * tokens * (2 + (8 * splits if splits > 1 else 0))
        return us + written / self._waves.cache

    def _program(self, kind: Kind, config: TileConfig | VectorConfig, held: int) -> Program:
        """With bytes and times for each column of K."""
        machine, rows = self.machine, config.rows
        bits = 4 if kind.code.in_words else 8
        moved = rows * (bits + (40 / kind.width if kind.width else 0)) / 8
        clocks = LANES * machine.clock_mhz
        if isinstance(config, VectorConfig):
            flight = (1 + config.ahead) * config.depth
            wait = 2 * self._waves.constants.latency / flight
            return Program(held, round(moved), 2, wait, rows * VECTOR_INSTRUCTIONS / clocks)
        inputs = config.tokens * (1 if config.rounded else 2)
        wait = self._waves.constants.latency / ((config.stages - 1) * config.depth)
        work = self._waves.tile_work(rows, config.tokens, specialized=False)
        if config.rounded:
            shared = (rows + 2 * config.tokens) / SHARED_BYTES_PER_CLOCK / machine.clock_mhz
            work = max(work / 2, shared)
        else:
            work = max(work / RATE, rows * CONVERSIONS[kind.code.in_words] / clocks)
        return Program(held, max(1, round(moved)), inputs, wait, work)


def _splits_of(product: Product, config: TileConfig | VectorConfig, tokens: int, most: int) -> list[int]:
    """In how many parts K can be cut, as far as programs are still lacking."""
    if isinstance(config, VectorConfig) or product.form not in SPLIT_FORMS:
        return [1]
    tiles = config.tiles(product.rows) * -(-tokens // config.tokens)
    return [
        splits
        for splits in SPLITS
        if splits == 1
        or (
            product.inputs % (splits * config.depth) == 0
            and product.inputs // splits >= max(LEAST_PART, DEPTH)
            and tiles * splits <= most
        )
    ]


def with_splits(config: TileConfig, splits: int) -> TileConfig:
    """The same with K in this many parts."""
    return TileConfig(
        config.rows, config.tokens, config.depth, config.stages, config.warps, splits, config.tma, config.rounded
    )
