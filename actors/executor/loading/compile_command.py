"""The command ``pagebus compile-kernels``: fills Triton's cache, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec

from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.memory.groups import with_groups
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands, count
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.kernels.common.machines import target_named
from pagebus.kernels.common.target import Target, first_target

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
"""Of the A100, the A40, the L40S, the H100 and H200 (SXM), the B200, and the RTX 5090."""


def add_compile(commands: Commands) -> None:
    """Add ``compile-kernels`` to the command line."""
    parser = commands.add(
        "compile-kernels",
        run_compile,
        help="compile a model's kernels ahead of its start",
        description="Compile every kernel that an executor launches for this model with these options into Triton's "
        "cache (TRITON_CACHE_DIR, by default ~/.triton/cache). No GPU is needed, only the same version of Triton. "
        "A start with the same options finds them there and compiles nothing.",
        epilog=SETTINGS_EPILOG,
    )
    parser.add_argument(
        "--target",
        nargs="+",
        metavar="SM",
        default=[],
        help="kinds of GPU, such as sm_90 or L40S (default: the one here)",
    )
    add_target_details(parser)
    parser.add_argument("--jobs", type=count, metavar="N", help="parallel compilers (default: the number of cores)")
    add_arguments(parser)


def run_compile(arguments: argparse.Namespace) -> int:
    """Compile what is missing; returns the exit code.

    Raises:
        SettingsError: a target that is not understood or cannot do what the settings ask, or nothing to compile with.
    """
    if find_spec("triton") is None:
        raise SettingsError("Triton is missing, which compiles kernels: pip install triton")
    settings = load_settings(arguments)
    targets = [target_in(arguments, name) for name in arguments.target] or [_target_here()]
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    try:
        config = ModelConfig.of(settings)
        config = with_groups(settings, with_quantization(settings, config))
        for target in targets:
            check_gpu(settings, config, target)
            _compile(settings, config, target, jobs)
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 1
    return 0


def add_target_details(parser: argparse.ArgumentParser) -> None:
    """Add what further describes a ``--target``."""
    parser.add_argument("--multiprocessors", type=count, metavar="N", help="multiprocessors of the target")
    parser.add_argument(
        "--memory-gb-per-s", type=count, metavar="N", default=0, help="bandwidth of the target (default: as usual)"
    )


def target_in(arguments: argparse.Namespace, name: str) -> Target:
    """The target ``name`` with its details."""
    found = parse_target(name, arguments.multiprocessors)
    gb_per_s = arguments.memory_gb_per_s or found.memory_gb_per_s
    return Target(found.capability, found.num_multiprocessors, gb_per_s)


def parse_target(name: str, num_multiprocessors: int | None) -> Target:
    """``sm_90`` as a target, or ``L40S``.

    Raises:
        SettingsError: another form, or a kind of GPU whose number of multiprocessors is not known here.
    """
    named = None if name[:1].isdigit() or name.startswith("sm_") else target_named(name)
    if named is not None:
        return Target(named.capability, num_multiprocessors or named.num_multiprocessors, named.memory_gb_per_s)
    digits = name.removeprefix("sm_")
    if not digits.isdecimal():
        raise SettingsError(f"--target {name}: a form like sm_90, or the name of a GPU such as L40S, is needed")
    known = num_multiprocessors or MULTIPROCESSORS.get(int(digits))
    if known is None:
        raise SettingsError(f"--target {name}: say with --multiprocessors how many such a GPU has")
    return Target(int(digits), known)


def _target_here() -> Target:
    target = first_target()
    if target is None:
        raise SettingsError("there is no GPU here: name the kind that is meant with --target")
    return target


def _compile(settings: Settings, config: ModelConfig, target: Target, jobs: int) -> None:
    from pagebus.actors.executor.loading.kernel_cache import cache_dir, mark_path

    mark = mark_path(settings, config, target)
    if mark.exists():
        print(f"sm_{target.capability}: nothing to do, {cache_dir()} has all kernels")
        return
    began_s = time.monotonic()
    from pagebus.actors.executor.loading.compilation import Turn, compile_kernels

    turn = Turn(mark_path(settings.replace(rank=0), config, target).with_suffix(".lock"))
    total = compile_kernels(settings, rank_config(config, settings), target, jobs, turn)
    mark.touch()
    print(f"sm_{target.capability}: {total} kernels are in {cache_dir()}, after {time.monotonic() - began_s:.1f} s")
