"""The text of /metrics, the models, the small routes."""

from __future__ import annotations

import asyncio

from pagebus.actors.runtime.actor import metrics_state
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.contract import BusUnavailable


async def text_of(http, served) -> list[str]:
    async with http.get(served.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return (await response.text()).splitlines()


async def test_own_metrics(serve, http):
    """Requests, tokens, latencies and HTTP counts, under the names of vLLM's dashboards."""
    served = await serve()
    async with http.post(served.url + "/v1/completions", json={"prompt": "one two", "n": 2, "max_tokens": 3}):
        pass
    async with http.post(served.url + "/v1/completions", json={"prompt": 5}):
        pass
    async with http.get(served.url + "/secret/path"):
        pass

    lines = await text_of(http, served)

    for line in (
        'vllm:request_success_total{finished_reason="length",model_name="fake-model"} 2.0',
        'vllm:request_success_total{finished_reason="abort",model_name="fake-model"} 0.0',
        'vllm:prompt_tokens_total{model_name="fake-model"} 2.0',
        'vllm:generation_tokens_total{model_name="fake-model"} 6.0',
        'vllm:time_to_first_token_seconds_count{model_name="fake-model"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="fake-model"} 4.0',
        'vllm:e2e_request_latency_seconds_count{model_name="fake-model"} 1.0',
        'vllm:request_prompt_tokens_bucket{model_name="fake-model",le="2.0"} 1.0',
        'vllm:request_prefill_kv_computed_tokens_sum{model_name="fake-model"} 1.0',
        'vllm:request_generation_tokens_sum{model_name="fake-model"} 6.0',
        'vllm:request_max_num_generation_tokens_sum{model_name="fake-model"} 3.0',
        'vllm:request_decode_time_seconds_count{model_name="fake-model"} 2.0',
        'vllm:request_time_per_output_token_seconds_count{model_name="fake-model"} 2.0',
        'vllm:time_per_output_token_seconds_count{model_name="fake-model"} 4.0',
        'vllm:request_params_n_bucket{model_name="fake-model",le="1.0"} 0.0',
        'vllm:request_params_n_sum{model_name="fake-model"} 2.0',
        'vllm:request_params_max_tokens_sum{model_name="fake-model"} 3.0',
        'vllm:admission_rejections_total{model_name="fake-model",reason="max_num_queued_reqs"} 0.0',
        'http_request_duration_seconds_count{handler="/v1/completions",method="POST",model_name="fake-model"} 2.0',
        'http_requests_total{handler="/v1/completions",method="POST",model_name="fake-model",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",model_name="fake-model",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="GET",model_name="fake-model",status="4xx"} 1.0',
    ):
        assert line.replace("{", '{actor="ingress-0",') in lines
    assert not any("secret" in line for line in lines)


async def test_embeddings_generate_nothing(serve, http):
    """As `usage` says: the token that each input needs is not shown, and nobody has set its `max_tokens`."""
    served = await serve()
    async with http.post(served.url + "/v1/embeddings", json={"input": ["one two", "three"]}) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 0
    lines = await text_of(http, served)
    for line in ("vllm:prompt_tokens_total{} 3.0", "vllm:generation_tokens_total{} 0.0",
                 "vllm:request_generation_tokens_count{} 2.0", "vllm:request_generation_tokens_sum{} 0.0",
                 "vllm:request_max_num_generation_tokens_sum{} 0.0", "vllm:request_params_max_tokens_count{} 0.0",
                 "vllm:e2e_request_latency_seconds_count{} 2.0"):  # fmt: skip
        assert line.replace("{}", '{actor="ingress-0",model_name="fake-model"}') in lines


async def test_rejections(serve, http):
    """Are counted by the limit that was reached."""
    served = await serve(answers=False, max_num_queued_requests=1)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x"}))
    await served.backend.requested()
    async with http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 429
    name = 'vllm:admission_rejections_total{actor="ingress-0",model_name="fake-model",reason='
    found = [line.removeprefix(name) for line in await text_of(http, served) if line.startswith(name)]
    assert found == ['"max_num_queued_reqs"} 1.0', '"max_num_queued_tokens"} 0.0', '"other"} 0.0',
                     '"tokens_per_minute"} 0.0']  # fmt: skip
    asking.cancel()


async def test_probes_are_no_failed_requests(serve, http):
    """A 503 of theirs says that something is missing, and counts among the answers only; a request's is an error."""
    served = await serve()
    await served.backend.leave("executor")
    await served.refresh()
    for method, path, body in (("GET", "/health", None), ("GET", "/readyz", None),
                               ("POST", "/v1/completions", {"prompt": "x"})):  # fmt: skip
        async with http.request(method, served.url + path, json=body) as response:
            assert response.status == 503
    lines = await text_of(http, served)
    for line in ('http_requests_total{handler="/health",method="GET",model_name="fake-model",status="5xx"} 1.0',
                 'pagebus:errors_total{model_name="fake-model",status="503"} 1.0'):  # fmt: skip
        assert line.replace("{", '{actor="ingress-0",') in lines


async def test_load_in_heads(serve, http):
    """For who asks in one of two forms, of answers that are generated, streams too."""
    served = await serve()
    metrics = Metrics()
    for engine, usage in (("a", 0.25), ("b", 0.75)):
        metrics.gauge("vllm:kv_cache_usage_perc", "Usage.", engine=engine).set(usage)
    metrics.gauge("vllm:num_requests_waiting", "Waiting.").set(3)
    await served.backend.bus.put_state(metrics_state("scheduler", "leader"), metrics.snapshot())
    texts = {
        "TEXT": "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=3.0",
        "json": 'JSON {"named_metrics":{"kv_cache_usage_perc":0.5,"num_requests_waiting":3.0}}',
        "xml": None,
    }
    for form, told in texts.items():
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            headers = {"endpoint-load-metrics-format": form}
            async with http.post(served.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.headers.get("endpoint-load-metrics") == told
    async with http.get(served.url + "/version", headers={"endpoint-load-metrics-format": "text"}) as response:
        assert "endpoint-load-metrics" not in response.headers


async def test_all_actors_are_gathered(serve, http):
    """What the other live actors put on the bus is there too, also of one whose lease has another name."""
    served = await serve()
    for kind, name in (("scheduler", "scheduler-0"), ("executor", "executor-0")):
        metrics = Metrics()
        metrics.gauge("vllm:num_requests_running", "Running.", engine=kind).set(3)
        await served.backend.bus.put_state(metrics_state(kind, name), metrics.snapshot())
    await served.backend.leave("scheduler")
    await served.backend.join("scheduler", actor="scheduler-0")
    await served.refresh()

    lines = await text_of(http, served)

    for kind in ("scheduler", "executor"):
        assert f'vllm:num_requests_running{{engine="{kind}",model_name="fake-model"}} 3.0' in lines


async def test_metrics_without_the_bus(serve, http, monkeypatch):
    """While the bus is away the ingress still shows its own."""
    served = await serve()

    async def away(*_: str) -> None:
        raise BusUnavailable("away")

    monkeypatch.setattr(served.actor.bus, "get_state", away)

    assert any(line.startswith("pagebus:open_requests") for line in await text_of(http, served))


async def test_models(serve, http):
    """Every name of the model is listed and can be shown; another is a 404."""
    served = await serve()

    async with http.get(served.url + "/v1/models") as response:
        listed = await response.json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["fake-model", "alias"]
    assert listed["data"][1] == {
        "id": "alias", "object": "model", "created": 1_700_000_000, "owned_by": "pagebus", "root": "fake-model",
        "parent": None, "max_model_len": 512,
    }  # fmt: skip
    async with http.get(served.url + "/v1/models/alias") as response:
        assert await response.json() == listed["data"][1]
    async with http.get(served.url + "/v1/models/org/none") as response:
        assert response.status == 404
        assert (await response.json())["error"]["reason"] == "model_not_found"


async def test_small_routes(serve, http):
    """The version and the way in; HEAD works where GET does."""
    served = await serve()

    async with http.get(served.url + "/version") as response:
        version = (await response.json())["version"]
    async with http.get(served.url + "/") as response:
        body = await response.json()
    async with http.head(served.url + "/health") as response:
        assert response.status == 200
    async with http.post(served.url + "/ping") as response:
        assert response.status == 200
    assert (body["name"], body["version"]) == ("pagebus", version)
