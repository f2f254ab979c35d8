"""The command line: what it accepts, what it says, and what it does not import."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagebus.actors.commands.cli import COMMANDS, build_parser, main
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import KINDS
from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    command = [sys.executable, "-m", "pagebus.actors.commands.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints name and version."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pagebus {version()}\n"


def test_output_that_nobody_reads_ends_the_command_silently() -> None:
    """As in `pagebus models --json | head`."""
    command = [sys.executable, "-m", "pagebus.actors.commands.cli", "models", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(LIMIT_S) == 141


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "the following arguments are required: COMMAND; see pagebus --help"),
        ("actor nosuch", "argument KIND: invalid choice: 'nosuch' .*; see pagebus actor --help"),
        ("job status", "the following arguments are required: FILE; see pagebus job status --help"),
        ("simulate --trace a --json /nowhere/x", "argument --json: /nowhere/x: there is no folder /nowhere; .*"),
        ("simulate --trace a --record /nowhere/x", "argument --record: /nowhere/x: there is no folder /nowhere; .*"),
        ("simulate --trace a --plot /dev/null/x", "argument --plot: /dev/null/x: Not a directory; .*"),
        ("simulate --trace a --rate nan", "argument --rate: invalid number value: 'nan'; .*"),
        ("bench serve --json .", "argument --json: . is a folder; .*"),
        ("bench engine --json /nowhere/x", "argument --json: /nowhere/x: there is no folder /nowhere; .*"),
        ("bench start --json /nowhere/x", "argument --json: /nowhere/x: there is no folder /nowhere; .*"),
        ("bench profile --out /nowhere/x", "argument --out: /nowhere/x: there is no folder /nowhere; .*"),
        ("bench shape qwen06b /dev/null", "argument FOLDER: /dev/null: File exists; .*"),
        ("bench serve --request-rate nan", "argument --request-rate: invalid rate value: 'nan'; .*"),
        ("complete a --temperature inf", "argument --temperature: invalid number value: 'inf'; .*"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert re.fullmatch(f"pagebus: {told}\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["serve", "actor", "healthcheck"])
def test_help_groups_the_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows every group of settings, with vLLM's names."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n{group}:\n" in text for group in ("service", "processes", "engine", "memory", "logging"))
    assert "--gpu-memory-utilization" in text
    assert "--max-responses-bytes-per-key BYTES" in text
    assert "PAGEBUS_MAX_MODEL_LEN" in text


@pytest.mark.parametrize(
    "command",
    ["actor", "healthcheck", "record", "dead-letters list", "dead-letters requeue", "job submit", "job cancel"],
)
def test_commands_of_a_deployment_that_is_there_need_its_bus(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their help promises no private server, and they take what a Redis with a password and TLS needs."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "a private redis-server, or" not in text
    assert "URL of the bus that all actors share: redis://, rediss://, unix:// or redis+sentinel:// (required" in text
    assert all(
        flag in text for flag in ("--redis-password", "--redis-ca-file", "--redis-key-file", "--allow-open-redis")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_parses(kind: str) -> None:
    """pagebus actor KIND takes a bus, a name and a model."""
    arguments = build_parser().parse_args(["actor", kind, "m", "--bus", "redis://h", "--actor-name", "x"])
    assert (arguments.kind, arguments.model, arguments.bus, arguments.actor_name) == (kind, "m", "redis://h", "x")


def test_bad_setting_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value ends the command with one line that names the flag."""
    assert main(["actor", "scheduler", "--bus", "redis://h", "--port", "99999"]) == 2
    assert capsys.readouterr().err == "pagebus: --port 99999: must be at most 65535\n"


def test_actor_needs_a_bus(capsys: pytest.CaptureFixture[str]) -> None:
    """An actor alone is told which bus to use."""
    assert main(["actor", "scheduler"]) == 2
    assert "--bus is needed" in capsys.readouterr().err


def test_actor_refuses_the_memory_bus(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory bus cannot be shared between processes."""
    assert main(["actor", "scheduler", "--bus", "memory://"]) == 2
    assert "inside one process" in capsys.readouterr().err


def test_each_command_is_known_alone() -> None:
    """A process builds the parser of its own command only: all can be found so."""
    whole, apart = build_parser(), [build_parser(command) for command in COMMANDS]
    assert commands_of(whole) == set(COMMANDS)
    assert all(command in commands_of(parser) for command, parser in zip(COMMANDS, apart, strict=True))
    assert commands_of(build_parser("serve")) == {"serve"}
    assert commands_of(build_parser("no such command")) == set(COMMANDS)


def commands_of(parser: argparse.ArgumentParser) -> set[str]:
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return set(action.choices)


def test_options_are_not_abbreviated() -> None:
    """A flag that is added later must not change what an old command means."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--max-model", "3"])


def test_healthcheck_fails_without_a_server(unused_tcp_port: int) -> None:
    """Nobody listens: exit code 1, no traceback."""
    result = run("healthcheck", "ingress", "--port", str(unused_tcp_port))
    assert (result.returncode, result.stderr) == (1, "")


IMPORTS = """
import json, sys
from pagebus.actors.runtime.process import actor_class
import pagebus.actors.commands.cli, pagebus.actors.runtime.supervisor, pagebus.actors.commands.serve
{extra}
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""
HEAVY = ["torch", "transformers", "triton"]
HEAVIER = [*HEAVY, "numpy", "pagebus.bus.codec"]


@pytest.mark.parametrize(("extra", "heavy"), [("", HEAVIER), ("actor_class('scheduler')", HEAVY)])
def test_light_commands_import_no_torch(extra: str, heavy: list[str]) -> None:
    """The command, the supervisor and the scheduler start without torch and transformers; the first two do without
    numpy and messages as well."""
    code = IMPORTS.format(extra=extra, heavy=heavy)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (json.loads(result.stdout or "null"), result.stderr) == ([], "")
