"""What can never run is refused at once, with one message to whoever asked."""

from __future__ import annotations

import pytest

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.engine_driver import ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import eventually
from tests.system.harness import running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        pytest.param([1] * 600, {}, id="prompt longer than the context"),
        pytest.param([1, 2, 10**6], {}, id="token id outside the vocabulary"),
        pytest.param(ints([1, -5]), {}, id="negative token id"),
        pytest.param([1] * 30, {"max_tokens": 500}, id="prompt and answer longer than the context"),
    ],
)
async def test_a_request_that_can_never_run_gets_a_400(folder, prompt, sampling):
    """One RequestFailed with status 400, and nothing stays behind."""
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server), max_model_len=512) as system:
        system.submit(prompt, **sampling)

        async def refused() -> bool:
            return bool(await system.failures())

        await eventually(refused)
        failures = await system.failures()

        assert [failure.status for failure in failures] == [400]
