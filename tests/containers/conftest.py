"""One project for all tests of containers: built once, brought down at the end, whatever has happened."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.load import Load
from tests.containers.project import BUILD_S, Project, why_not
from tests.containers.streams import make_load
from tests.helpers.oracle import make_oracle

ASKED = os.environ.get("PAGEBUS_TEST_CONTAINERS") == "1"


@pytest.fixture(scope="session")
def engine() -> None:
    """A container engine, or a reason to skip."""
    if not ASKED:
        pytest.skip("`make containers` runs these: they build an image and start containers")
    if (why := why_not()) is not None:
        pytest.skip(f"no container was tested, no engine answers: {why}")


@pytest.fixture(scope="session")
def project(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project, with its image built."""
    project = Project(tmp_path_factory.mktemp("project"))
    project.compose("build", limit_s=BUILD_S)
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="session")
def oracles(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project with a model whose answers are always the same, and take their time."""
    folder = make_oracle(tmp_path_factory.mktemp("oracle") / "model", step_ms=20)
    folder.parent.chmod(0o755)
    project.write_override(f"{folder}:/model:ro")
    project.write_env(
        PAGEBUS_MODEL="/model", PAGEBUS_SERVED_MODEL_NAME="oracle", PAGEBUS_LOAD_FORMAT="dummy", PAGEBUS_THREADS="1",
        PAGEBUS_CPU_KV_CACHE_GIB="0.01",
    )  # fmt: skip
    return project


@pytest.fixture
async def load(oracles: Project) -> Load:
    """Streams over a deployment in which all is well, and what they answer without a fault."""
    oracles.up()
    load = make_load(oracles.url)
    await load.learn()
    return load
