"""What all tests share: the Redis fixtures, a clean environment, and that no task or logging outlives its test."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Generator, Iterator

import hypothesis
import pytest
import structlog
import torch

from tests import grids
from tests.helpers import interpreter, patience

# Continuous integration tries the same examples each time; everybody else's runs look for new ones.
# None has a deadline: a busy machine is no error.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=grids.examples(100))
hypothesis.settings.register_profile("searching", deadline=None, max_examples=grids.examples(100))
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "searching")
# Where Python may not keep what it has compiled, each of hundreds of processes compiles all of Pagebus anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time: threads of torch would wait, in children
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # and here, where torch has read its environment already
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides while functions are decorated: before any is imported
for variable in [name for name in os.environ if name.startswith("PAGEBUS_") and not name.startswith("PAGEBUS_TEST_")]:
    del os.environ[variable]

patience.leases_in_memory()

pytest_plugins = ["tests.helpers.redis_fixture"]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected lives as long as the run: the collector of garbage need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        interpreter.hasten()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make grids` runs; skip GPU tests where there is no GPU; watch the tasks of asynchronous
    tests. Slow tests begin first, whatever the order of the others: at the end of a run one process would be left with
    them."""
    grids.leave_out(config, items)
    items.sort(key=lambda item: "slow" not in item.keywords)
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "no_task_left")
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """An asynchronous test leaves no task behind: what it started, it must end. Used by all of them."""
    before = asyncio.all_tasks()
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if not task.done() and task is not asyncio.current_task()]
    assert left == [], f"tasks left over: {left}"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test sets up of logging ends with it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
