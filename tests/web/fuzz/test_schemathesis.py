"""What schemathesis makes of our own description: bodies that fit it and bodies that do not, to every operation.

``PAGEBUS_TEST_FUZZ=20000`` sends about so many requests in all instead of a few hundred, and ``PAGEBUS_TEST_FUZZ_SEED``
others.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.app import ROUTES
from pagebus.web.routes.openapi import describe
from tests.helpers.waiting import LIMIT_S, TEST_LIMIT_S, until
from tests.web.fake_backend import MODEL, SENTENCE, Served, start_served

COUNT = int(os.environ.get("PAGEBUS_TEST_FUZZ", "280"))
SEED = int(os.environ.get("PAGEBUS_TEST_FUZZ_SEED", "0"))
SHORT = replace(MODEL, max_model_len=64)
"""Else some bodies ask for millions of tokens."""
SCHEMA = schemathesis.openapi.from_dict(describe(ROUTES, SHORT, "test"))
ENDLESS = ("/api/events",)
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations() if result.ok().path not in ENDLESS]
WITH_BODY = [operation for operation in OPERATIONS if operation.body]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
RUNS = [(operation, POSITIVE) for operation in OPERATIONS] + [(operation, NEGATIVE) for operation in WITH_BODY]


def num_examples(operation: schemathesis.APIOperation) -> int:
    """Few where there is nothing to vary."""
    return COUNT // len(WITH_BODY) // 2 if operation.body else max(1, COUNT // 200)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An ingress in a thread of its own."""
    loop, server = asyncio.new_event_loop(), MemoryServer()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(LIMIT_S)

    files = str(tmp_path_factory.mktemp("files"))
    started = run(start_served(lambda: MemoryBus(server), SHORT, files_dir=files, bus="memory://"))
    yield started
    admission = started.actor.context.admission
    run(until(lambda: (admission.total.requests, admission.total.tokens) == (0, 0)))
    assert started.actor.context.inbox.num_open == 0
    run(started.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(("operation", "mode"), RUNS, ids=[f"{mode.value} {run.label}" for run, mode in RUNS])
@pytest.mark.timeout(TEST_LIMIT_S + COUNT)
def test_operation(served, operation, mode):
    """Answers are as described, and none is a 5xx; what does not fit the description is refused."""
    checks = [*CHECKS, negative_data_rejection] if mode == NEGATIVE else CHECKS

    num_sent = 0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=num_examples(operation),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        deadline=None,
        database=None,
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        nonlocal num_sent
        num_sent += 1
        case.call_and_validate(base_url=served.url, checks=checks, timeout=LIMIT_S)

    call()
    print(f"{num_sent} requests")


def test_right_answers_afterwards(served):
    """Whatever came before, a request is answered as ever (the fixture looks whether anything is left over)."""
    case = SCHEMA["/v1/completions"]["POST"].Case(body={"prompt": "x"}, media_type="application/json")

    answer = case.call(base_url=served.url).json()

    assert answer["choices"][0]["text"] == "".join(SENTENCE)
