"""The ``pagebus`` command. Only what a command needs is imported, and only once the command is known."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pagebus.actors.bench.command import add_bench
from pagebus.actors.commands.dead_letters_command import add_dead_letters
from pagebus.actors.commands.jobs.command import add_jobs
from pagebus.actors.commands.models_command import add_models
from pagebus.actors.commands.terminal.command import add_terminal
from pagebus.actors.executor.explain_command import add_explain
from pagebus.actors.executor.inspect_command import add_inspect
from pagebus.actors.executor.loading.compile_command import add_compile
from pagebus.actors.executor.preload import preload_alone
from pagebus.actors.executor.tune_command import add_tune
from pagebus.actors.model.errors import ModelError
from pagebus.actors.runtime.bytecode import keep_bytecode
from pagebus.actors.runtime.gc_tuning import collect_seldom
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import KINDS, SettingsError
from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import SHARED_BUS_HELP, add_arguments, load_settings, unknown_option
from pagebus.actors.settings.vllm_flags import undotted
from pagebus.actors.simulator.command import add_simulator
from pagebus.actors.telemetry.last_words import say

DESCRIPTION = "Pagebus serves large language models: independent actors over Redis Streams, an OpenAI-compatible API."


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of a command with all settings has a hundred."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pagebus: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"pagebus {version()}")
        parser.exit()


def _add_serve(commands: Commands) -> None:
    serve = commands.add(
        "serve",
        _serve,
        help="start everything on this machine and serve a model",
        description="Start all actors as processes of this machine, watch over them, and serve a model.",
        epilog=SETTINGS_EPILOG,
    )
    add_arguments(serve)


def _add_actor(commands: Commands) -> None:
    actor = commands.add(
        "actor",
        _actor,
        help="run one actor on a shared bus",
        description="Run one actor in this process. All actors that share a bus and a --name make one deployment.",
        epilog=SETTINGS_EPILOG,
    )
    actor.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add_arguments(actor, texts={"bus": f"{SHARED_BUS_HELP} (required)"})


def _add_healthcheck(commands: Commands) -> None:
    health = commands.add(
        "healthcheck",
        _healthcheck,
        help="succeed if an actor of a kind is ready",
        description="Exit with 0 if an actor of this kind is ready, else with 1. Made for container health checks.",
        epilog=SETTINGS_EPILOG,
    )
    health.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    health.add_argument("--here", action="store_true", help="consider only actors of this host")
    add_arguments(health, model=False, texts={"bus": f"{SHARED_BUS_HELP} (required, but for ingress)"})


COMMANDS = {
    "serve": _add_serve, "actor": _add_actor, "healthcheck": _add_healthcheck, "simulate": add_simulator,
    "record": add_simulator, "compile-kernels": add_compile, "explain": add_explain, "tune": add_tune,
    "models": add_models, "inspect": add_inspect,
    "dead-letters": add_dead_letters, "bench": add_bench, "job": add_jobs, "run-batch": add_jobs,
    "chat": add_terminal, "complete": add_terminal, "top": add_terminal,
}  # fmt: skip
"""Who adds which command to the command line."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; of a ``command`` that there is, that one's only: most take all settings, and to add these
    takes 3 ms each time."""
    parser = _Parser(prog="pagebus", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = Commands(parser)
    for add in [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values()):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (0 done, 1 failed, 2 unusable settings or model, 141 nobody reads)."""
    keep_bytecode()
    words = undotted([dashed(each) for each in (sys.argv[1:] if argv is None else argv)])
    parser = build_parser(words[0] if words else None)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        chosen: argparse.ArgumentParser = arguments.parser
        parser.exit(2, f"pagebus: {unknown_option(unknown[0], flags_of(chosen))}; see {chosen.prog} --help\n")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except (SettingsError, ModelError) as error:
        say(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has read enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
        return 141
    return code


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """The options that its help shows."""
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return [flag for action in shown for flag in action.option_strings]


def dashed(argument: str) -> str:
    """``--max_model_len=4`` as ``--max-model-len=4``: vLLM takes both."""
    name, equals, value = argument.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def _serve(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments)
    from pagebus.actors.commands.serve import serve

    return serve(settings)


def _actor(arguments: argparse.Namespace) -> int:
    collect_seldom()
    if arguments.kind == "executor":
        preload_alone()
    settings = load_settings(arguments)
    from pagebus.actors.runtime.process import run_actor

    return run_actor(arguments.kind, settings)


def _healthcheck(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments)
    from pagebus.actors.runtime.health_check import healthy
    from pagebus.actors.runtime.process import make_bus

    bus = None if arguments.kind == "ingress" else make_bus(settings)
    return 0 if asyncio.run(healthy(arguments.kind, settings, bus, here=arguments.here)) else 1


if __name__ == "__main__":
    sys.exit(main())
