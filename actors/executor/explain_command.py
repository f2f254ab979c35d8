"""The command ``pagebus explain``: which kernels run, and why, on a machine with or without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.loading.compile_command import add_target_details, target_in
from pagebus.actors.executor.memory.groups import with_groups
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.kernels.common.target import Target, first_target

if TYPE_CHECKING:
    from pagebus.actors.executor.explain import AbsentEngine, ExplainedStep

WIDTH = 200
"""Of the table where it goes to no terminal."""
MARKS = {"residual": "+norm", "partial": "+sums", "added": "+add"}
LEGEND = (
    "+norm: adds itself to the residual stream and does half of the next norm; +sums: leaves partial sums to the norm; "
    "+add: adds itself."
)


def add_explain(commands: Commands) -> None:
    """Add ``explain`` to the command line."""
    parser = commands.add(
        "explain",
        run_explain,
        help="show which kernels a model's steps run, and why",
        description="For each kind of step, say which path attention takes and what each product gets, with these "
        "options, on the GPU here or on another. Neither a GPU nor weights are needed, only the model's config.json.",
        epilog=SETTINGS_EPILOG,
    )
    parser.add_argument(
        "--target", metavar="SM", help="a kind of GPU, such as sm_89 or L40S, or cpu (default: this machine's)"
    )
    add_target_details(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object on standard output")
    add_arguments(parser)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit code.

    Raises:
        SettingsError: a target that is not understood or cannot do what the settings ask.
    """
    settings = load_settings(arguments)
    target = target_of_arguments(settings, arguments)
    try:
        config = ModelConfig.of(settings)
        config = with_groups(settings, with_quantization(settings, config))
        config = rank_config(config, settings)
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    if config.in_one_step:
        print(
            "pagebus: explain: an encoder decodes nothing, and its attention is torch's (docs/pooling.md)",
            file=sys.stderr,
        )
        return 2
    check_gpu(settings, config, target)
    from pagebus.actors.executor.explain import AbsentEngine

    engine = AbsentEngine(settings, config, target)
    about = {
        "model": settings.model or "the shipped one",
        "target": "cpu" if target is None else f"sm_{target.capability}",
        "multiprocessors": None if target is None else target.num_multiprocessors,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(engine.kv_dtype).removeprefix("torch."),
        "rank": f"{settings.rank} of {settings.num_ranks}" if settings.num_ranks > 1 else None,
    }
    if arguments.json:
        print(json.dumps(about | {"steps": [step.as_json() for step in engine.steps()]}))
    else:
        _print(about, engine)
    return 0


def target_of_arguments(settings: Settings, arguments: argparse.Namespace) -> Target | None:
    """The GPU that ``--target`` names, else the one here; None: a CPU."""
    if settings.device == "cpu" or arguments.target == "cpu":
        return None
    return target_in(arguments, arguments.target) if arguments.target else first_target()


def _print(about: dict[str, str | int | None], engine: AbsentEngine) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    steps, console = engine.steps(), Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    words = [f"{name.replace('_', ' ')} {value}" for name, value in about.items() if value is not None]
    console.print(Text(", ".join(words)))
    names = list(steps[0].kernels.products) if steps else []
    table = Table(box=None, pad_edge=False)
    for name in ("step", "launch", "attention", *names):
        table.add_column(name, overflow="fold", no_wrap=name in ("step", "launch"))
    for step in steps:
        products = step.kernels.products.values()
        marked = (f"{choice.kernel}{MARKS.get(choice.form, '')}" for choice in products)
        table.add_row(*(Text(cell) for cell in (step.name, step.launch, step.kernels.attention, *marked)))
    console.print(table)
    for title, lines in (("attention", _attention_reasons(steps)), *((name, _reasons(steps, name)) for name in names)):
        console.print(Text(f"\n{title}"))
        for line in lines:
            console.print(Text(f"  {line}"))
    console.print(Text(f"\n{LEGEND}"))


def _attention_reasons(steps: list[ExplainedStep]) -> list[str]:
    """One line for each path and reason, in the order of the steps."""
    return list(dict.fromkeys(f"{step.kernels.attention}: {step.why}" for step in steps))


def _reasons(steps: list[ExplainedStep], product: str) -> list[str]:
    """One line for each kernel and reason; estimates, which differ from step to step, in one line for each kernel."""
    from pagebus.kernels.linear.dispatch import LinearChoice, Source
    from pagebus.kernels.moe.choice import ExpertsChoice

    lines: dict[str, list[str]] = {}
    for step in steps:
        choice = step.kernels.products[product]
        if isinstance(choice, LinearChoice) and choice.source is Source.MODEL and choice.estimate is not None:
            own, library = choice.estimate.us, choice.estimate.library
            head = f"{choice.kernel}: {choice.source}, estimated µs of our kernel and the library: "
            lines.setdefault(head, []).append(f"{step.name} {own:.1f} and {library:.1f}")
        elif isinstance(choice, ExpertsChoice) and choice.us is not None:
            head = f"{choice.kernel}: {choice.source}, estimated µs: "
            lines.setdefault(head, []).append(f"{step.name} {choice.us:.1f}")
        else:
            lines.setdefault(f"{choice.kernel}: {choice.why}", [])
    return [head + "; ".join(dict.fromkeys(each)) for head, each in lines.items()]
