"""The load of the deployment in a response header, for load balancers (ORCA, as in vLLM).

A request with ``endpoint-load-metrics-format: TEXT`` or ``JSON`` gets the header ``endpoint-load-metrics``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from aiohttp import web

from pagebus.actors.runtime.actor import actor_of, metrics_state
from pagebus.bus.contract import Bus, BusUnavailable, LeaseInfo

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
NAMES = {"vllm:kv_cache_usage_perc": "kv_cache_usage_perc", "vllm:num_requests_waiting": "num_requests_waiting"}
ROUTES = frozenset({"completions", "chat_completions"})


def format_of(request: web.Request) -> str:
    """What a request asks for: ``text``, ``json``, or nothing that there is."""
    form = request.headers.get(ASKED, "").lower()
    return form if form in ("text", "json") and request.match_info.route.name in ROUTES else ""


async def load_of(bus: Bus, leases: Iterable[LeaseInfo]) -> dict[str, float]:
    """The share of the cache in use (0 to 1, the mean over executors), and how many sequences wait; empty while the
    bus is away."""
    states = [metrics_state(each.kind, actor_of(each)) for each in leases if each.kind == "scheduler"]
    try:
        snapshots = await bus.get_state(*states) if states else []
    except BusUnavailable:
        return {}
    found: dict[str, list[float]] = {}
    for snapshot in filter(None, snapshots):
        series: Any = snapshot["series"]
        for name, _, data in series:
            if name in NAMES:
                found.setdefault(NAMES[name], []).append(float(data["value"]))
    return {name: sum(values) / len(values) for name, values in found.items()}


def written(form: str, load: Mapping[str, float]) -> str:
    """The header's value."""
    if form == "text":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    return "JSON " + orjson.dumps({"named_metrics": dict(load)}).decode()
