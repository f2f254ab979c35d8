"""The ``pagebus`` command. Only what a command needs is imported, and only once the command is known."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from actors.bench.command import add_bench, run_bench
from actors.dead_letters_command import add_command as add_dead_letters_command
from actors.dead_letters_command import run_command as run_dead_letters_command
from actors.executor.compile_command import add_command as add_compile_command
from actors.executor.compile_command import run_command as run_compile_command
from actors.executor.preload import preload_torch
from actors.garbage import collect_seldom
from actors.jobs.command import add_commands as add_jobs_commands
from actors.jobs.command import run_command as run_jobs_command
from actors.settings import KINDS, Settings, SettingsError
from actors.settings.sources import add_arguments, load_settings
from actors.simulator.command import add_commands as add_simulator_commands
from actors.simulator.command import run_command as run_simulator_command
from actors.terminal.command import COMMANDS as TERMINAL_COMMANDS
from actors.terminal.command import add_commands as add_terminal_commands
from actors.terminal.command import run_command as run_terminal_command

DESCRIPTION = "Pagebus serves large language models: independent actors over Redis Streams, an OpenAI-compatible API."
EPILOG = (
    "Every option can also come from the environment (--max-model-len: PAGEBUS_MAX_MODEL_LEN) or from the TOML file "
    "given with --config (max_model_len = 4096). The command line wins, then the environment, then the file."
)


def version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("pagebus")
    except PackageNotFoundError:
        return "0+unknown"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"pagebus {version()}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="pagebus", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start everything on this machine and serve a model",
        description="Start all actors as processes of this machine, watch over them, and serve a model.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add_arguments(serve)
    actor = commands.add_parser(
        "actor",
        help="run one actor, against a bus that others share",
        description="Run one actor in this process. All actors that share a bus and a --name make one deployment.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    actor.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add_arguments(actor)
    health = commands.add_parser(
        "healthcheck",
        help="succeed if an actor of a kind is ready",
        description="Exit with 0 if an actor of this kind is ready, else with 1. Made for container health checks.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    health.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    health.add_argument("--here", action="store_true", help="only actors of this host count")
    add_arguments(health, model=False)
    add_simulator_commands(commands.add_parser)
    add_compile_command(commands.add_parser, EPILOG)
    add_dead_letters_command(commands.add_parser, EPILOG)
    add_bench(commands.add_parser)
    add_jobs_commands(commands.add_parser)
    add_terminal_commands(commands.add_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 failed, 2 unusable settings or model)."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command in ("simulate", "record"):
            return run_simulator_command(arguments)
        if arguments.command == "compile-kernels":
            return run_compile_command(arguments)
        if arguments.command in ("job", "run-batch"):
            return run_jobs_command(arguments)
        if arguments.command == "dead-letters":
            return run_dead_letters_command(arguments)
        if arguments.command == "bench":
            return run_bench(arguments)
        if arguments.command in TERMINAL_COMMANDS:
            return run_terminal_command(arguments)
        settings = load_settings(arguments)
        if arguments.command == "serve":
            return _serve(settings)
        if arguments.command == "actor":
            collect_seldom()
            if arguments.kind == "executor":
                preload_torch()
            from actors.process import run_actor

            return run_actor(arguments.kind, settings)
        return _healthcheck(arguments.kind, settings, here=arguments.here)
    except SettingsError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(settings: Settings) -> int:
    from actors.serve import serve

    return serve(settings)


def _healthcheck(kind: str, settings: Settings, *, here: bool) -> int:
    from actors.probe import healthy
    from actors.process import make_bus

    bus = None if kind == "ingress" else make_bus(settings)
    return 0 if asyncio.run(healthy(kind, settings, bus, here=here)) else 1


if __name__ == "__main__":
    sys.exit(main())
