"""The command ``pagebus tune``: measures the launch shapes of a model's products, experts and attention on the
GPU here.

A model that generates is tuned within its decode steps. Experts of more tokens, and models that only pool, are timed
alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.kernels.common.target import Target, first_target
from pagebus.kernels.common.user_tables import Tuned, user_path

if TYPE_CHECKING:
    from pagebus.actors.executor.tuning.changes import Measurable
    from pagebus.actors.executor.tuning.tune import TunedStep
    from pagebus.kernels.linear.tuning.tune import Timed
    from pagebus.kernels.moe.tune import TimedExperts

    Found = Timed | TimedExperts | TunedStep

MINUTES = 5.0
SHARE_OF_EXPERTS = 0.5
"""Of the time, for experts of more tokens than a tuned step has, or of a model that only pools."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Rows of the steps that may be tuned: those of `pagebus.kernels.linear.shapes`, which imports torch."""


def add_tune(commands: Commands) -> None:
    """Add ``tune`` to the command line."""
    parser = commands.add(
        "tune",
        run_tune,
        help="measure a model's launch shapes on the GPU here",
        description="Replay decode steps of a short model of this shape with other launch shapes for its matrix "
        "products, experts and attention, and keep those with which the step is faster in tables that every later "
        "start on such a GPU reads. No weights are needed, only the model's config.json. Nothing else should use the "
        "GPU meanwhile.",
        epilog=SETTINGS_EPILOG,
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="N",
        help="begin nothing later than this (default: %(default)g)",
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        choices=BUCKETS,
        default=BUCKETS,
        metavar="N",
        help="tune steps of these numbers of tokens only (of %(choices)s; default: all)",
    )
    add_arguments(parser)


def run_tune(arguments: argparse.Namespace) -> int:
    """Measure and write the table; returns the exit code.

    Raises:
        SettingsError: there is no GPU, no Triton, stages are asked for, or this GPU cannot do what the settings ask.
    """
    settings = load_settings(arguments)
    if settings.pipeline_parallel_size > 1:
        raise SettingsError("tune: not with stages, whose products are those of a model without: leave out -pp")
    if not 0 < arguments.minutes <= 24 * 60:
        raise SettingsError("--minutes: more than 0 and at most 1440 are needed")
    if find_spec("triton") is None:
        raise SettingsError("Triton is missing, which compiles kernels: pip install triton")
    target = None if settings.device == "cpu" else first_target()
    if target is None:
        raise SettingsError("tune: there is no GPU here to measure on")
    try:
        whole = with_quantization(settings, ModelConfig.of(settings))
        config = rank_config(whole, settings)
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    check_gpu(settings, config, target)
    todo = measurable(settings, config, target)
    if not todo.products and todo.experts is None:
        raise SettingsError("tune: with these settings no launch shape depends on measurements")
    folder = launch_shapes_folder(settings)
    if config.pooler is None:
        found = _tune_steps(settings, config, todo, target, folder, arguments)
    else:
        found = _tune_alone(todo, target, folder, arguments.minutes)
    print(_summary(found, folder))
    return 0 if found else 1


def measurable(settings: Settings, config: ModelConfig, target: Target) -> Measurable:
    """Of an engine with these settings."""
    from pagebus.actors.executor.explain import AbsentEngine
    from pagebus.actors.executor.tuning.changes import Measurable

    engine = AbsentEngine(settings, config, target)
    if engine.dtype.itemsize != 2:
        return Measurable([], None, None)
    chooser = engine.runner.chooser
    return Measurable(chooser.measurable(), chooser.measurable_experts(), chooser.measurable_heads())


def _tune_steps(
    settings: Settings, config: ModelConfig, todo: Measurable, target: Target, folder: Path,
    arguments: argparse.Namespace,
) -> list[Found]:  # fmt: skip
    """Steps first; then experts of more tokens than these have, if there is time left."""
    from pagebus.actors.executor.device.device import resolve_dtype, resolve_kv_dtype
    from pagebus.actors.executor.loading.dry_run import META
    from pagebus.actors.executor.tuning.compiler import Wanted
    from pagebus.actors.executor.tuning.tune import tune_steps

    minutes, end_s = arguments.minutes, monotonic() + 60 * arguments.minutes
    dtype = resolve_dtype(settings, config.dtype, META)
    wanted = Wanted(config, dtype, resolve_kv_dtype(settings, dtype), settings.attention_backend)
    share = minutes if todo.experts is None else minutes * (1 - SHARE_OF_EXPERTS)
    names = ", ".join(product.name for product in todo.products)
    _announce(f"{len(todo.products)} products ({names})", share, user_path(target, folder))
    found: list[Found] = [*tune_steps(wanted, todo, target, folder, share, _tell, arguments.tokens)]
    left = (end_s - monotonic()) / 60
    return found if todo.experts is None else [*found, *_tune_experts(todo, target, folder, left, BUCKETS[-1])]


def _tune_alone(todo: Measurable, target: Target, folder: Path, minutes: float) -> list[Found]:
    """Experts first, which take most of a step; products what is left."""
    from pagebus.kernels.linear.tuning.timing import Compilers
    from pagebus.kernels.linear.tuning.tune import tune
    from pagebus.kernels.quantized.tuning.tune import sort_of

    end_s = monotonic() + 60 * minutes
    share = minutes * SHARE_OF_EXPERTS if todo.products else minutes
    found = _tune_experts(todo, target, folder, share)
    left = (end_s - monotonic()) / 60
    if todo.products and left > 0:
        names = ", ".join(product.name for product in todo.products)
        _announce(f"{len(todo.products)} products ({names})", left, user_path(target, folder))
        with Compilers() as compilers:
            found += tune(todo.products, target, folder, left, _tell, compilers, sort_of=sort_of)
    return found


def _tune_experts(todo: Measurable, target: Target, folder: Path, minutes: float, above: int = 0) -> list[Found]:
    """Alone, of more tokens than ``above``."""
    from pagebus.kernels.linear.tuning.timing import Compilers
    from pagebus.kernels.moe.tune import tune_experts

    if todo.experts is None or minutes <= 0:
        return []
    _announce(f"experts {todo.experts.name}", minutes, user_path(target, folder, Tuned.EXPERTS))
    with Compilers() as compilers:
        return [*tune_experts(todo.experts, target, folder, minutes, _tell, compilers, above=above)]


def _announce(what: str, minutes: float, path: Path) -> None:
    _tell(f"{what}, at most {minutes:.3g} minutes; the table is {path}")


def _tell(line: str) -> None:
    print(line, flush=True)


def _summary(found: Sequence[Found], folder: Path) -> str:
    changed = [each for each in found if each.changed]
    if not changed:
        return f"{len(found)} choices were measured and none is changed; tables in {folder} say so"
    saved = max(1 - each.after / each.before for each in changed)
    return (
        f"{len(changed)} of {len(found)} choices are changed, the best by {saved:.0%}; "
        f"tables in {folder} are read by the next start"
    )
