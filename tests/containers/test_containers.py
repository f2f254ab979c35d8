"""compose.yaml and the image, with a real engine: brought up, asked, scaled, hurt and brought down.

Run by ``make containers``, in this order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.chaos.load import Load
from tests.chaos.servers import free_port
from tests.containers.project import ACTORS, BUILD_S, COMMAND_S, Project
from tests.containers.streams import COUNT, during, make_load, problems
from tests.helpers.waiting import LIMIT_S, until
from tests.test_docs import blocks

pytestmark = [pytest.mark.timeout(BUILD_S + COMMAND_S), pytest.mark.usefixtures("engine")]
ADDRESS = "http://127.0.0.1:8000"
JOB = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A dog is", "max_tokens": 4}}


def readme(language: str, having: str) -> str:
    """The README's block in a language that has this text."""
    (found,) = [body for page, body in blocks(language) if page == "README.md" and having in body]
    return found


async def apart(function: Callable[..., object], *arguments: str) -> object:
    """A command of the engine, while streams are read."""
    return await asyncio.to_thread(function, *arguments)


async def actors_of(url: str) -> dict[str, dict[str, Any]]:
    """What `/health` says of the actors: kind, name, state."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        states: dict[str, dict[str, Any]] = (await response.json())["actors"]
        return states


async def nothing() -> None:
    """Happens."""


# -- the shipped model ------------------------------------------------------------------------------------------------


def test_the_image_has_no_more_than_it_needs(project: Project) -> None:
    """No CUDA, no Triton, requirements that are met, and a home in which its user may write."""
    script = "pip check && pip list --format freeze && touch .cache/x files/x kernels/x && ls -ld .cache"
    printed = project.run("docker", "run", "--rm", "--entrypoint", "sh", "pagebus:cpu", "-c", script)
    names = {line.partition("==")[0] for line in printed.splitlines() if "==" in line}
    assert {"torch", "pagebus", "opentelemetry-sdk"} <= names
    assert [name for name in names if name.startswith(("triton", "nvidia", "cuda"))] == []


async def test_one_container(project: Project) -> None:
    """`docker run` serves by itself; one that is stopped with time ends its answers first."""
    port = free_port()
    (command,) = [line for line in readme("sh", "docker run").splitlines() if "docker run" in line]
    words = command.partition("#")[0].replace("--gpus all ", "").replace("cuda", "cpu").replace(":8000:", f":{port}:")
    container = project.run(*words.split()[:2], "--detach", *words.split()[2:]).strip()
    try:
        load = make_load(f"http://127.0.0.1:{port}", model="pagebus", tokens=200)
        await until_ready(load.url)
        answers = await during(load, lambda: apart(project.run, "docker", "stop", container))
        assert [answer.ends for answer in answers] == [{0: ("length", None)}] * COUNT
        assert project.inspect(container)["State"]["ExitCode"] == 0
    finally:
        project.run("docker", "rm", "--force", container)


async def until_ready(url: str) -> None:
    """Until requests would be answered."""
    async with asyncio.timeout(COMMAND_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


def test_up(project: Project) -> None:
    """Plain `up` of what .env says: all services are well, each in one container, of one image."""
    project.up()
    assert set(project.containers()) == {f"{project.name}-{service}-1" for service in (*ACTORS, "redis")}
    images = {project.inspect(each)["Image"] for each in project.containers(*ACTORS).values()}
    assert len(images) == 1


def test_up_again_changes_nothing(project: Project) -> None:
    """Neither a second `up` nor one that builds replaces a container."""
    project.up()
    before = project.containers()
    project.up()
    project.up("--build")
    assert project.containers() == before


def test_requests_of_the_readme(project: Project) -> None:
    """curl's and the openai package's."""
    project.up()
    answer = json.loads(project.run("bash", "-ec", readme("sh", "curl http").replace(ADDRESS, project.url)))
    assert answer["choices"][0]["message"]["content"].startswith("water (noun)")
    printed = project.run(sys.executable, "-c", readme("python", "from openai import").replace(ADDRESS, project.url))
    assert printed.startswith("brave (adjective)")


async def test_a_job(project: Project) -> None:
    """What redis-cli pushes in the container of Redis is answered on the stream of results."""
    project.up()
    redis = ("exec", "--no-TTY", "redis", "redis-cli")
    project.compose(*redis, "XADD", "{pagebus}:jobs", "*", "request", json.dumps(JOB))
    limit_ms = str(int(LIMIT_S * 1000))
    printed = project.compose(*redis, "XREAD", "BLOCK", limit_ms, "STREAMS", "{pagebus}:results", "0")
    line = json.loads(next(text for text in printed.splitlines() if text.startswith('{"')))
    assert (line["custom_id"], line["response"]["body"]["usage"]["completion_tokens"]) == ("one", 4)


def test_the_password_is_not_told(project: Project) -> None:
    """No container logs a piece of it."""
    project.up()
    assert "c#d%41" not in project.compose("logs")


# -- under twenty streams ---------------------------------------------------------------------------------------------


async def test_scale(oracles: Project, load: Load) -> None:
    """More of a kind come and go while streams run."""
    more = ("--scale", "tokenizer=2", "--scale", "detokenizer=2", "--scale", "executor-cpu=2")
    assert problems(load, await during(load, lambda: apart(oracles.up, *more))) == []
    actors = await actors_of(oracles.url)
    assert [len(actors[kind]) for kind in ("tokenizer", "detokenizer", "executor")] == [2, 2, 2]
    assert problems(load, await during(load, lambda: apart(oracles.up))) == []
    assert len(oracles.containers()) == len(ACTORS) + 1


@pytest.mark.parametrize("service", [service for service in ACTORS if service != "ingress"])
async def test_an_actor_dies(oracles: Project, load: Load, service: str) -> None:
    """The engine starts it again, and no client can tell."""
    before = oracles.restarts(service)
    assert problems(load, await during(load, lambda: apart(oracles.crash, service))) == []
    await until(lambda: oracles.restarts(service) > before, look_s=0.5)


async def test_the_ingress_dies(oracles: Project, load: Load) -> None:
    """Clients with a key come back for the rest."""
    before = oracles.restarts("ingress")
    assert problems(load, await during(load, lambda: apart(oracles.crash, "ingress"), keyed=True)) == []
    assert oracles.restarts("ingress") > before


async def test_redis_restarts(oracles: Project, load: Load) -> None:
    """All wait for it and go on."""
    assert problems(load, await during(load, lambda: apart(oracles.compose, "restart", "redis"))) == []


async def test_killed_by_hand(oracles: Project, load: Load) -> None:
    """What `compose kill` ends stays away until `start`, and streams wait for it."""

    async def kill_and_start() -> None:
        await apart(oracles.compose, "kill", "detokenizer")
        assert "Exit" in await asyncio.to_thread(oracles.compose, "ps", "--all", "detokenizer")
        await apart(oracles.compose, "start", "detokenizer")

    assert problems(load, await during(load, kill_and_start)) == []


@pytest.mark.parametrize("command", ["stop", "down"])
async def test_the_end_under_load(oracles: Project, load: Load, command: str) -> None:
    """Plain `stop` and `down` let every stream end, and leave no container running; then `up` answers again."""
    assert problems(load, await during(load, lambda: apart(oracles.compose, command))) == []
    assert oracles.compose("ps", "--quiet") == ""
    codes = {oracles.inspect(each)["State"]["ExitCode"] for each in oracles.containers().values()}
    assert codes <= {0}
    oracles.up()
    assert problems(load, await during(load, nothing)) == []


def test_down_leaves_nothing(oracles: Project) -> None:
    """Also what the profile of .env has started."""
    oracles.compose("down")
    own = f"label=com.docker.compose.project={oracles.name}"
    assert oracles.run("docker", "ps", "--all", "--quiet", "--filter", own) == ""
