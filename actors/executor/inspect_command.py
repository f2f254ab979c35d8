"""The command ``pagebus inspect``: what a model is made of, and what would run it, without loading it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pagebus.actors.executor.explain_command import WIDTH, target_of_arguments
from pagebus.actors.executor.loading.compile_command import add_target_details
from pagebus.actors.executor.memory.groups import with_groups
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_model
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands, amount
from pagebus.actors.settings.sources import add_arguments, load_settings

if TYPE_CHECKING:
    from pagebus.actors.executor.inspection import WeightGroup

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def add_inspect(commands: Commands) -> None:
    """Add ``inspect`` to the command line."""
    parser = commands.add(
        "inspect",
        run_inspect,
        help="show what a model's weights are, how they are quantized, and what they take",
        description="Print parameters, formats and bytes of a model's weights, what a block of its cache takes, and "
        "what would run it. Its config.json is enough; the headers of its weights are checked if they are there.",
        epilog=SETTINGS_EPILOG,
    )
    parser.add_argument("--target", metavar="SM", help="a kind of GPU, such as sm_89, or cpu (default: this machine's)")
    add_target_details(parser)
    parser.add_argument(
        "--memory-gib", type=amount, metavar="GIB", help="memory of the target, for the blocks of its cache"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object on standard output")
    add_arguments(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit code.

    Raises:
        SettingsError: a target that is not understood or cannot do what the settings ask.
    """
    settings = load_settings(arguments)
    target = target_of_arguments(settings, arguments)
    try:
        path = resolve_model(settings, weights=False)
        config = with_groups(settings, with_quantization(settings, ModelConfig.of(settings, path)))
        config = rank_config(config, settings)
        from pagebus.actors.executor.inspection import Inspection

        inspection = Inspection(settings, config, target, path, arguments.memory_gib)
        found = inspection.as_json()
    except ModelError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found, inspection.groups)
    return 0


def _print(found: dict[str, Any], groups: list[WeightGroup]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    console.print(Text(
        f"{found['architecture']}, {found['quantization'] or 'not quantized'}, "
        f"{found['parameters'] / 1e9:.3g} billion parameters in {readable(found['bytes'])}"
    ))  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for name in ("weights", "number", "shape", "format", "layout", "bytes"):
        table.add_column(name, overflow="fold", no_wrap=name != "format")
    for each in groups:
        shape = " x ".join(map(str, each.shape))
        cells = (each.name, str(each.count), shape, each.format, each.layout, readable(each.bytes))
        table.add_row(*map(Text, cells))
    console.print(table)
    for line in _lines(found):
        console.print(Text(line))


def _lines(found: dict[str, Any]) -> list[str]:
    cache = found["kv_cache"]
    blocks = "unknown (--memory-gib)" if cache["most_blocks"] is None else f"at most {cache['most_blocks']}"
    lines = [
        f"cache: {readable(cache['block_bytes'])} for a block of {cache['block_size']} tokens; blocks: {blocks}",
        _of_one_sequence(cache),
        f"files: {found['files']}",
        *(f"{name}: {kernels}" for name, kernels in found["runs"].items()),
    ]
    if found["unmatched_entries"]:
        lines.append(f"entries of quantization_config that mean no weight: {', '.join(found['unmatched_entries'])}")
    return lines


def _of_one_sequence(cache: dict[str, Any]) -> str:
    """The line about the longest sequence's part of the cache."""
    count, size = cache["sequence_blocks"], readable(cache["sequence_blocks"] * cache["block_bytes"])
    pages = cache["windowed_pages"]
    layers = f"{pages} of {1 + pages} pages of a block" if pages else "all layers"
    window = f", as {layers} have windows of at most {cache['window']} tokens" if cache["window"] else ""
    return f"longest sequence: {size} in at most {count} blocks{window}"


def readable(size: float) -> str:
    """``4.21 GiB``"""
    for unit, name in UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
