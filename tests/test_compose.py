"""compose.yaml and the Dockerfile, checked against the real command line, and run as processes without containers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagebus.actors.commands.cli import build_parser
from pagebus.actors.runtime.process import make_bus
from pagebus.actors.settings import KINDS, Settings
from pagebus.actors.settings.sources import from_environment, load_settings
from pagebus.bus.streams import Names
from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ACTORS = {name: service for name, service in SERVICES.items() if service["image"].startswith("pagebus:")}
CORES = ("ingress", "tokenizer", "scheduler", "executor", "detokenizer")


def as_compose(text: str) -> str:
    """``${NAME:-default}`` as it is without the variable."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", ACTORS)
def test_command_parses(name: str) -> None:
    """Each service's command and environment are understood by the real command, and name the shared bus."""
    service = ACTORS[name]
    arguments = build_parser().parse_args(service["command"])
    settings = load_settings(arguments, {key: as_compose(value) for key, value in service["environment"].items()})
    assert arguments.kind == name.partition("-")[0]
    assert (settings.bus, settings.redis_password) == ("redis://redis:6379/0", "pagebus")
    make_bus(settings)  # which refuses a server on another machine that has no password


def test_one_service_builds_the_image() -> None:
    """Of a service that builds Compose makes an image of its own, and replaces its containers when that changes."""
    assert [name for name, service in SERVICES.items() if "build" in service] == ["ingress"]
    assert len({service["image"] for service in ACTORS.values()}) == 1
    arguments = re.findall(r"^ARG (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    known = {word.partition("=")[0] for line in arguments for word in line.split()}
    assert SERVICES["ingress"]["build"]["args"].keys() <= known


def test_what_takes_work_stops_first() -> None:
    """Compose stops dependents before what they depend on: where work comes in needs all others, those only Redis."""
    others = {"redis", *ACTORS} - {"ingress", "jobs"}
    for name, service in ACTORS.items():
        assert set(service["depends_on"]) == (others if name in ("ingress", "jobs") else {"redis"})
    optional = [name for name, how in SERVICES["ingress"]["depends_on"].items() if not how.get("required", True)]
    assert optional == ["executor", "executor-cpu"]


def test_variables_of_the_cpu_variant() -> None:
    """The three that the README names decide what is built and which executor runs."""
    (command,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("printf")]
    values = dict(word.split("=") for word in command.split() if "=" in word)
    assert values == {"VARIANT": "cpu", "COMPOSE_PROFILES": "cpu", "EXECUTORS": "0"}
    assert as_compose(SERVICES["executor"]["deploy"]["replicas"]) == "1"
    assert SERVICES["executor"]["deploy"]["replicas"].startswith("${EXECUTORS:-")
    assert SERVICES["executor-cpu"]["profiles"] == [values["COMPOSE_PROFILES"]]


@pytest.mark.parametrize("name", ACTORS)
def test_healthcheck_looks_at_the_file(name: str) -> None:
    """The check of every actor finds its file while it is young, and starts no Python."""
    service = ACTORS[name]
    file = service["environment"]["PAGEBUS_HEALTH_FILE"]
    assert health(service, file) == ["CMD-SHELL", f"find {file} -newermt '-30 seconds' | grep -q ."]


def test_healthcheck_of_a_file(tmp_path: Path) -> None:
    """It succeeds for a young file, and neither for an old nor for a missing one."""
    file = tmp_path / "well"
    command = health(ACTORS["ingress"], str(file))[1]
    seen = []
    for age_s in (None, 0, 3600):
        if age_s is not None:
            file.touch()
            os.utime(file, (time.time() - age_s,) * 2)
        seen.append(subprocess.run(["sh", "-c", command], capture_output=True).returncode)
    assert seen == [1, 0, 1]


def health(service: dict[str, Any], file: str) -> list[str]:
    """A service's check, with a file of ours in place of its own."""
    own = service["environment"]["PAGEBUS_HEALTH_FILE"]
    return [word.replace(own, file) for word in service["healthcheck"]["test"]]


@pytest.mark.parametrize("name", ["redis", *ACTORS])
def test_healthchecks_are_seldom(name: str) -> None:
    """Often only until the first success."""
    check = SERVICES[name]["healthcheck"]
    assert check["interval"] == "30s"
    assert {"start_interval", "start_period"} <= check.keys()


def test_every_kind_has_a_service() -> None:
    """Redis and the six actors; on request only: the executor for machines without a GPU, and what watches."""
    on_request = {"executor-cpu": "cpu", "prometheus": "monitoring", "grafana": "monitoring", "jaeger": "monitoring"}
    assert set(SERVICES) == {"redis", *KINDS, *on_request}
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        name: [profile] for name, profile in on_request.items()
    }


def test_services_can_be_scaled() -> None:
    """No fixed container name and no host port, except those that people open, on this machine only."""
    for name, service in SERVICES.items():
        assert "container_name" not in service
        assert ("ports" in service) == (name in ("ingress", "grafana", "jaeger"))
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_containers_get_time_to_drain() -> None:
    """The grace period is longer than the default drain timeout."""
    for service in ACTORS.values():
        assert int(service["stop_grace_period"].removesuffix("s")) > Settings().drain_timeout_s


def test_volumes_are_declared() -> None:
    """Every named volume and every file that a service mounts exists."""
    used = {mount.partition(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())}
    files = {source for source in used if source.startswith("./")}
    assert used - files == set(COMPOSE["volumes"])
    assert [source for source in files if not (ROOT / source).is_file()] == []


def test_the_dashboard_is_provisioned() -> None:
    """Prometheus scrapes the ingress's port, Grafana knows Prometheus and finds the dashboard where it is mounted."""
    folder = ROOT / "web" / "dashboards"
    targets = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    (source,) = yaml.safe_load((folder / "grafana-datasource.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "grafana-dashboards.yml").read_text())["providers"]
    mounted = [mount.split(":")[1] for mount in SERVICES["grafana"]["volumes"]]

    assert targets == [f"ingress:{SERVICES['ingress']['environment']['PAGEBUS_PORT']}"]
    assert (source["url"], source["type"]) == ("http://prometheus:9090", "prometheus")
    assert f"{provider['options']['path']}/pagebus.json" in mounted
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounted


def test_redis_keeps_its_data() -> None:
    """Redis writes an append-only file into a volume, and never evicts."""
    command = " ".join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


def test_dockerfile_copies_what_exists() -> None:
    """Every COPY source is there, is not ignored, and the default command parses."""
    text = (ROOT / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for word in line.split()]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [source for source in sources if not (ROOT / source).exists() or source not in allowed] == []
    found = re.search(r"^CMD (\[.*\])$", text, re.M)
    assert found is not None
    assert build_parser().parse_args(json.loads(found[1])).host == "0.0.0.0"


class Deployment:
    """The services of compose.yaml as processes of this machine: Redis, the ports and the paths are replaced."""

    def __init__(self, redis_url: str, names: Names, port: int, folder: Path) -> None:
        self.port = port
        self._replaced = {
            "PAGEBUS_BUS": redis_url,
            "PAGEBUS_PORT": str(port),
            "PAGEBUS_GPU_LOCK_DIR": str(folder / "locks"),
            "PAGEBUS_REDIS_PASSWORD": "",
        }
        self._folder = folder
        self._extra = {"PAGEBUS_NAME": names.deployment, "OMP_NUM_THREADS": "1"}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    def environ(self, name: str) -> dict[str, str]:
        own = {key: self._replaced.get(key, as_compose(value)) for key, value in ACTORS[name]["environment"].items()}
        assert from_environment(own)
        return {**os.environ, **self._extra, **own, "PAGEBUS_HEALTH_FILE": self.health_file(name)}

    def health_file(self, name: str) -> str:
        """In place of the one that each container has of its own."""
        return str(self._folder / name)

    async def up(self, name: str) -> None:
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pagebus.actors.commands.cli",
            *ACTORS[name]["command"],
            cwd=ROOT,
            env=self.environ(name),
        )

    async def until_healthy(self, name: str) -> None:
        """Run the service's health check until it succeeds."""
        command = health(ACTORS[name], self.health_file(name))[1]
        while True:
            assert self.processes[name].returncode is None, f"{name} ended"
            check = await asyncio.create_subprocess_exec("sh", "-c", command, stderr=asyncio.subprocess.DEVNULL)
            if await check.wait() == 0:
                return
            await asyncio.sleep(0.5)

    async def down(self) -> dict[str, int]:
        """Stop all as compose does, dependents first; returns exit codes."""
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        return {name: await process.wait() for name, process in self.processes.items()}


def complete(port: int, prompt: str) -> dict[str, Any]:
    """One request, as a client would make it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=LIMIT_S) as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


async def test_the_services_serve_a_request(
    redis_url: str, redis_names: Names, unused_tcp_port: int, tmp_path: Path
) -> None:
    """Five processes with exactly the commands and environment of compose.yaml answer, and drain without an error."""
    deployment = Deployment(redis_url, redis_names, unused_tcp_port, tmp_path)
    try:
        for name in CORES:
            await deployment.up(name)
        async with asyncio.timeout(LIMIT_S):
            for name in reversed(CORES):
                await deployment.until_healthy(name)
        answer = await asyncio.to_thread(complete, unused_tcp_port, "A dog is")
        assert answer["usage"]["completion_tokens"] == 4
        assert await deployment.down() == dict.fromkeys(CORES, 0)
    finally:
        for process in deployment.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
