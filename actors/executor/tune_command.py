"""The command ``pagebus tune``: measures the launch shapes of a model's products on the GPU here."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pagebus.actors.executor.device.gpu_limits import check_gpu, refuse_ranks
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_model
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.kernels.common.target import Target, first_target

if TYPE_CHECKING:
    from pagebus.kernels.linear.shapes import Product
    from pagebus.kernels.linear.tune import Timed

MINUTES = 5.0


def add_tune(commands: Commands) -> None:
    """Add ``tune`` to the command line."""
    parser = commands.add(
        "tune",
        run_tune,
        help="measure a model's launch shapes on the GPU here",
        description="Time the launch shapes that the cost model finds best for each matrix product of this model, and "
        "keep those that are at least 2% faster in a table that every later start on such a GPU reads. No weights are "
        "needed, only the model's config.json. Nothing else should use the GPU meanwhile.",
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
    refuse_ranks(settings)
    if not 0 < arguments.minutes <= 24 * 60:
        raise SettingsError("--minutes: more than 0 and at most 1440 are needed")
    if find_spec("triton") is None:
        raise SettingsError("Triton is missing, which compiles kernels: pip install triton")
    target = None if settings.device == "cpu" else first_target()
    if target is None:
        raise SettingsError("tune: there is no GPU here to measure on")
    try:
        config = ModelConfig.load(resolve_model(settings, weights=False))
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    check_gpu(settings, config, target)
    products = measurable(settings, config, target)
    if not products:
        raise SettingsError("tune: with these settings no launch shape depends on measurements")
    return _tune(products, target, launch_shapes_folder(settings), arguments.minutes)


def measurable(settings: Settings, config: ModelConfig, target: Target) -> list[Product]:
    """The products of an engine with these settings that may be measured."""
    from pagebus.actors.executor.explain import AbsentEngine

    engine = AbsentEngine(settings, config, target)
    return engine.runner.chooser.measurable() if engine.dtype.itemsize == 2 else []


def _tune(products: list[Product], target: Target, folder: Path, minutes: float) -> int:
    from pagebus.kernels.linear.tune import tune
    from pagebus.kernels.linear.user_path import user_path

    path = user_path(target, folder)
    names = ", ".join(product.name for product in products)
    print(f"{len(products)} products ({names}), at most {minutes:g} minutes; the table is {path}", flush=True)
    found = tune(products, target, folder, minutes, lambda line: print(line, flush=True))
    print(_summary(found, path))
    return 0 if found else 1


def _summary(found: list[Timed], path: Path) -> str:
    changed = [each for each in found if each.changed]
    if not changed:
        return f"{len(found)} choices were measured and none is changed; {path} says so"
    saved = max(1 - each.after / each.before for each in changed)
    return (
        f"{len(changed)} of {len(found)} choices are changed, the best by {saved:.0%}; {path} is read by the next start"
    )
