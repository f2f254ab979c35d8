"""What kinds of GPUs can do, for estimates: `machines.json` has data sheets and the share of them that is reached.

The shares of the H200 are measured. Those of the others are estimates from published measurements. A GPU that the file
lacks gets the figures of its architecture, and its bandwidth from the driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pagebus.kernels.common.target import Target

DATA = Path(__file__).with_name("machines.json")
KB = 1024
ALIKE = 0.15
"""Bandwidths that differ by no more, as a share, are those of one kind of GPU."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of a multiprocessor. ``flops``: 16-bit operations of its tensor cores per clock; ``gb_per_s``: bandwidth
    for each multiprocessor of such GPUs, if the driver does not tell; both on the low side."""

    capability: int
    shared_bytes: int
    most_threads: int
    most_programs: int
    flops: int
    gb_per_s: float
    clock_ghz: float
    l2_mb: int

    @property
    def program_bytes(self) -> int:
        """Shared memory of one program, at most."""
        return self.shared_bytes - KB


ARCHITECTURES = (
    Architecture(80, 164 * KB, 2048, 32, 2048, 14.0, 1.41, 40),
    Architecture(86, 100 * KB, 1536, 16, 512, 8.0, 1.7, 6),
    Architecture(89, 100 * KB, 1536, 24, 512, 5.0, 2.4, 48),
    Architecture(90, 228 * KB, 2048, 32, 4096, 18.0, 1.7, 50),
    Architecture(100, 228 * KB, 2048, 32, 8192, 50.0, 1.8, 126),
    Architecture(120, 100 * KB, 1536, 24, 512, 10.0, 2.4, 64),
)
REGISTERS = 65536
"""Of a multiprocessor, of all architectures."""
GUESSED_SHARE = 0.85
"""Of what data sheets promise, on a GPU that is not known."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of GPU. ``bytes_per_us``: of a copy of memory; ``flops_per_us``: of 16-bit products by the library."""

    name: str
    architecture: Architecture
    multiprocessors: int
    bytes_per_us: float
    flops_per_us: float
    clock_mhz: float
    l2_bytes: int
    measured: bool = False
    """Whether estimates were fitted to it."""

    @property
    def has_early_launches(self) -> bool:
        """Programmatic dependent launch: kernels begin while those before them end."""
        return self.architecture.capability >= 90


def architecture_of(capability: int) -> Architecture:
    """The newest known one that is not newer."""
    return max(
        (each for each in ARCHITECTURES if each.capability <= capability),
        key=lambda each: each.capability,
        default=ARCHITECTURES[0],
    )


@cache
def machine_of(target: Target) -> Machine:
    """The kind of GPU that ``target`` is."""
    alike = [machine for machine, gb_per_s in machines() if _is_alike(target, machine, gb_per_s)]
    return alike[0] if alike else _unknown(target)


@cache
def machines() -> tuple[tuple[Machine, float], ...]:
    """All known kinds, with the bandwidth of their data sheets in GB/s."""
    return tuple((_parse(stored), stored["memory_gb_per_s"]) for stored in json.loads(DATA.read_text()))


def target_named(name: str) -> Target | None:
    """The target of a known kind of GPU, such as ``L40S``, in any spelling; None if it is none."""
    wanted = _plain(name)
    for machine, gb_per_s in machines():
        if any(digit.isdigit() for digit in wanted) and wanted in (_plain(machine.name), *_parts(machine.name)):
            return Target(machine.architecture.capability, machine.multiprocessors, round(gb_per_s))
    return None


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _parts(name: str) -> tuple[str, ...]:
    return tuple(map(_plain, name.split()))


def _is_alike(target: Target, machine: Machine, gb_per_s: float) -> bool:
    same = (machine.architecture.capability, machine.multiprocessors) == (target.capability, target.num_multiprocessors)
    return same and (not target.memory_gb_per_s or abs(target.memory_gb_per_s / gb_per_s - 1) <= ALIKE)


def _parse(stored: dict[str, float]) -> Machine:
    return Machine(
        str(stored["name"]),
        architecture_of(int(stored["capability"])),
        int(stored["multiprocessors"]),
        stored["memory_gb_per_s"] * stored["memory_share"] * 1e3,
        stored["bfloat16_tflops"] * stored["tflops_share"] * 1e6,
        stored["clock_ghz"] * 1e3,
        int(stored["l2_mb"]) << 20,
        bool(stored["measured"]),
    )


def _unknown(target: Target) -> Machine:
    its, count = architecture_of(target.capability), target.num_multiprocessors
    gb_per_s = target.memory_gb_per_s or its.gb_per_s * count
    flops_per_us = its.flops * count * its.clock_ghz * 1e3
    return Machine(
        f"sm_{target.capability} with {count} multiprocessors", its, count, gb_per_s * GUESSED_SHARE * 1e3,
        flops_per_us * GUESSED_SHARE, its.clock_ghz * 1e3, its.l2_mb << 20,
    )  # fmt: skip
