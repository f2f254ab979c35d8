"""Traces of a whole deployment, by what its actors measured."""

from __future__ import annotations

import asyncio

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.oracle import make_oracle
from tests.helpers.otlp_collector import HOPS, attributes, check_hops, collecting
from tests.helpers.waiting import eventually
from tests.system.serving import serving

STEP_MS = 2
MODEL = {"load_format": "dummy", "cpu_kv_cache_gib": 0.002, "swap_space": 0.002, "max_num_seqs": 4}


async def test_traces(tmp_path, monkeypatch):
    """Every hop of a request is in its trace; one whose scheduler is killed on the way is answered and traced too."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    model, server = make_oracle(tmp_path / "model", step_ms=STEP_MS), MemoryServer()
    options = {"open_bus": lambda _: MemoryBus(server), "lease_ttl_s": 0.5, **MODEL}
    async with (
        collecting() as collector,
        serving(model, otlp_traces_endpoint=collector.endpoint, **options) as client,
    ):
        await client.completion("one", max_tokens=8, ignore_eos=True)
        (trace,) = await collector.traces()
        assert list(trace) == ["llm_request", *HOPS]
        check_hops(trace)
        took_s = {name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for name, span in trace.items()}
        assert took_s["prefill"] >= STEP_MS / 1e3
        assert took_s["decode"] >= 7 * STEP_MS / 1e3
        told = attributes(trace["llm_request"])
        assert told["gen_ai.usage.completion_tokens"] == 8
        assert abs(told["gen_ai.latency.time_in_model_decode"] - took_s["decode"]) < 1e-6

        asking = asyncio.create_task(client.completion("two", max_tokens=100, ignore_eos=True))
        (replica,) = client.actors["scheduler"].core.replicas.values()
        seen = replica.step

        async def is_under_way():
            return replica.step > seen + 20

        await eventually(is_under_way)
        await client.replace("scheduler", MemoryBus(server))
        assert (await asking)["usage"]["completion_tokens"] == 100
        _, second = await collector.traces(2)
        assert list(second) == ["llm_request", *HOPS]
        check_hops(second)
        assert attributes(second["llm_request"])["gen_ai.usage.completion_tokens"] == 100
