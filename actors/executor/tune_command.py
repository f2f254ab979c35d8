"""The command ``pagebus tune``: measures the launch shapes of a model's products and experts on the GPU here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_model
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.kernels.common.target import Target, first_target
from pagebus.kernels.common.user_tables import Tuned, user_path

if TYPE_CHECKING:
    from pagebus.kernels.linear.shapes import Product
    from pagebus.kernels.linear.tune import Timed
    from pagebus.kernels.moe.launch.shapes import Shape
    from pagebus.kernels.moe.tune import TimedExperts

MINUTES = 5.0
SHARE_OF_EXPERTS = 0.5
"""Of the time, if a model has experts."""


def add_tune(commands: Commands) -> None:
    """Add ``tune`` to the command line."""
    parser = commands.add(
        "tune",
        run_tune,
        help="measure a model's launch shapes on the GPU here",
        description="Time the launch shapes that the cost model finds best for each matrix product of this model, and "
        "for its experts, and keep those that are at least 2% faster in tables that every later start on such a GPU "
        "reads. No weights are needed, only the model's config.json. Nothing else should use the GPU meanwhile.",
        epilog=SETTINGS_EPILOG,
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="N",
        help="begin nothing later than this (default: %(default)g)",
    )
    add_arguments(parser)


def run_tune(arguments: argparse.Namespace) -> int:
    """Measure and write the table; returns the exit code.

    Raises:
        SettingsError: there is no GPU, no Triton, ranks are asked for, or this GPU cannot do what the settings ask.
    """
    settings = load_settings(arguments)
    if settings.tensor_parallel_size > 1:
        raise SettingsError("tune: not with --tensor-parallel-size yet: a rank's shapes have the cost model's choices")
    if not 0 < arguments.minutes <= 24 * 60:
        raise SettingsError("--minutes: more than 0 and at most 1440 are needed")
    if find_spec("triton") is None:
        raise SettingsError("Triton is missing, which compiles kernels: pip install triton")
    target = None if settings.device == "cpu" else first_target()
    if target is None:
        raise SettingsError("tune: there is no GPU here to measure on")
    try:
        config = with_quantization(settings, ModelConfig.load(resolve_model(settings, weights=False)))
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    check_gpu(settings, config, target)
    todo = measurable(settings, config, target)
    if not todo.products and todo.experts is None:
        raise SettingsError("tune: with these settings no launch shape depends on measurements")
    return _tune(todo, target, launch_shapes_folder(settings), arguments.minutes)


class Measurable(NamedTuple):
    """What of an engine may be measured: products, and the experts of its layers if these are not quantized."""

    products: list[Product]
    experts: Shape | None


def measurable(settings: Settings, config: ModelConfig, target: Target) -> Measurable:
    """Of an engine with these settings."""
    from pagebus.actors.executor.explain import AbsentEngine

    engine = AbsentEngine(settings, config, target)
    if engine.dtype.itemsize != 2:
        return Measurable([], None)
    chooser = engine.runner.chooser
    return Measurable(chooser.measurable(), chooser.measurable_experts())


def _tune(todo: Measurable, target: Target, folder: Path, minutes: float) -> int:
    """Experts first, which take most of a step, and half of the time; products what is left."""
    from pagebus.kernels.linear.timing import Compilers
    from pagebus.kernels.linear.tune import tune
    from pagebus.kernels.moe.tune import tune_experts
    from pagebus.kernels.quantized.tuning.tune import sort_of

    found: list[Timed | TimedExperts] = []
    end_s = monotonic() + 60 * minutes
    with Compilers() as compilers:
        if todo.experts is not None:
            share = minutes * SHARE_OF_EXPERTS if todo.products else minutes
            _announce(f"experts {todo.experts.name}", share, user_path(target, folder, Tuned.EXPERTS))
            found += tune_experts(todo.experts, target, folder, share, _tell, compilers)
        left = (end_s - monotonic()) / 60
        if todo.products and left > 0:
            names = ", ".join(product.name for product in todo.products)
            _announce(f"{len(todo.products)} products ({names})", left, user_path(target, folder))
            found += tune(todo.products, target, folder, left, _tell, compilers, sort_of=sort_of)
    print(_summary(found, folder))
    return 0 if found else 1


def _announce(what: str, minutes: float, path: Path) -> None:
    _tell(f"{what}, at most {minutes:.3g} minutes; the table is {path}")


def _tell(line: str) -> None:
    print(line, flush=True)


def _summary(found: Sequence[Timed | TimedExperts], folder: Path) -> str:
    changed = [each for each in found if each.changed]
    if not changed:
        return f"{len(found)} choices were measured and none is changed; tables in {folder} say so"
    saved = max(1 - each.after / each.before for each in changed)
    return (
        f"{len(changed)} of {len(found)} choices are changed, the best by {saved:.0%}; "
        f"tables in {folder} are read by the next start"
    )
