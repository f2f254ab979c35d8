"""A copy of this project in a folder of its own, with a `.env`, as somebody who serves from it has one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.chaos.servers import free_port

ROOT = Path(__file__).parents[2]
ACTORS = ("ingress", "jobs", "tokenizer", "scheduler", "executor-cpu", "detokenizer")
BUILD_S, COMMAND_S = 2400, 300
PASSWORD = "a@b/c#d%41 e?f:[g]"
"""What a person may well choose, and a URL cannot hold."""
CPU = {"VARIANT": "cpu", "COMPOSE_PROFILES": "cpu", "EXECUTORS": "0"}
"""The three lines of the README for a machine without a GPU."""
VARIABLES = {*CPU, "TORCH_INDEX", "HTTP_PORT", "REDIS_PASSWORD", "COMPOSE_PROJECT_NAME", "COMPOSE_FILE"}
"""What counts is `.env`: in the environment these would come before it."""


def why_not() -> str | None:
    """Why no container can be started here; None: they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            return f"{' '.join(command)}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    return None


class Project:
    """The folder and the containers that Compose starts from it, under a name that no other project has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.port = folder, f"pagebus-test-{os.getpid()}", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        copy_tracked(folder)
        self.write_env()
        self.write_override()

    def write_env(self, **more: str) -> None:
        """The file `.env`."""
        own = {"HTTP_PORT": str(self.port), "REDIS_PASSWORD": f"'{PASSWORD}'", "COMPOSE_PROJECT_NAME": self.name}
        if torch_wheels() is not None:
            own["TORCH_INDEX"] = ""
        lines = [f"{name}={value}\n" for name, value in {**CPU, **own, **more}.items()]
        (self.folder / ".env").write_text("".join(lines))

    def write_override(self, *volumes: str) -> None:
        """What comes on top of compose.yaml: the folder with the wheel of torch, if one is told in PIP_FIND_LINKS, and
        volumes for all actors."""
        services: dict[str, Any] = {actor: {"volumes": list(volumes)} for actor in ACTORS}
        wheels = torch_wheels()
        if wheels is not None:
            services["ingress"]["build"] = {"additional_contexts": {"wheels": str(wheels)}}
        (self.folder / "compose.override.yaml").write_text(yaml.safe_dump({"services": services}))

    def compose(self, *arguments: str, limit_s: int = COMMAND_S) -> str:
        """What `docker compose` prints; it has to end well."""
        return self.run("docker", "compose", "--ansi", "never", *arguments, limit_s=limit_s)

    def run(self, *command: str, limit_s: int = COMMAND_S) -> str:
        """What a command prints that ends well, in the project's folder."""
        done = self._call(command, limit_s)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-4000:]}\n{done.stdout[-4000:]}"
        return done.stdout

    def _call(self, command: tuple[str, ...], limit_s: int) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=limit_s)

    def up(self, *arguments: str) -> None:
        """Start what is not there, and wait until all of it is well."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", str(COMMAND_S), *arguments)

    def containers(self, *services: str) -> dict[str, str]:
        """Ids of the containers there are, running or not, by name."""
        listed = self.compose("ps", "--all", "--format", "json", *services)
        return {each["Name"]: each["ID"] for each in map(json.loads, listed.splitlines())}

    def inspect(self, container: str) -> Mapping[str, Any]:
        """All that the engine knows of a container."""
        found: Mapping[str, Any] = json.loads(self.run("docker", "inspect", container))[0]
        return found

    def restarts(self, service: str) -> int:
        """How often the engine has started the one container of a service again."""
        (container,) = self.containers(service).values()
        return int(self.inspect(container)["RestartCount"])

    def crash(self, service: str) -> None:
        """Have the processes of a service die (the engine's own `kill` counts as an operator's wish).

        How this ends says nothing: the container may be gone before the command is.
        """
        self._call(("docker", "compose", "exec", "--no-TTY", service, "sh", "-c", "kill -KILL -1"), COMMAND_S)


def copy_tracked(folder: Path) -> None:
    """Copy every file that belongs to the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def torch_wheels() -> Path | None:
    """The folder of PIP_FIND_LINKS that has a CPU build of torch, if there is one."""
    folders = map(Path, os.environ.get("PIP_FIND_LINKS", "").split())
    return next((folder.resolve() for folder in folders if any(folder.glob("torch-*+cpu-*.whl"))), None)
