"""Generates the load of a benchmark: the calls of a workload, their times and their concurrency. All of it follows from
the spec, so that several processes can each generate their part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pagebus.actors.bench.driver.requests import make_prompts, scaled
from pagebus.actors.simulator.recording.trace import Trace
from pagebus.actors.simulator.workloads import make_workload
from pagebus.bus.messages import Int32Array

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door"
)
"""Prompts as text are made of these: each is one token, or little more, of usual tokenizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One benchmark of a server. ``rate`` (requests per second) 0: all at once; ``concurrency`` 0: no limit."""

    base_url: str
    backend: str
    endpoint: str
    model: str
    workload: str
    requests: int | None = None
    scale: float = 1.0
    seed: int = 0
    rate: float = 0.0
    burstiness: float = 1.0
    concurrency: int = 0
    as_text: bool = False
    vocab_size: int = 4096
    temperature: float = 0.0
    ignore_eos: bool = True
    continuous_usage: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 3600.0
    processes: int = 1
    lora_modules: Sequence[str] = ()
    """Adapters that requests name in place of ``model``."""
    lora_assignment: str = "random"
    """How they do that: ``random``, or ``round-robin``."""

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its number, its body, when it is sent (seconds from the start), and the tokens it should give."""

    number: int
    body: bytes
    at_s: float
    output_tokens: int


def make_calls(spec: Spec, *, part: int = 0) -> list[Call]:
    """Every ``spec.processes``-th call of the workload, from ``part`` on."""
    trace = scaled(make_workload(spec.workload, seed=spec.seed, requests=spec.requests), spec.scale)
    prompts = make_prompts(trace, spec.vocab_size, (spec.seed, 0))
    times = arrivals(len(trace), spec.rate, spec.burstiness, spec.seed)
    numbers = range(part, len(trace), spec.processes)
    return [Call(number, _body(spec, trace, number, prompts), float(times[number]), int(trace.output_tokens[number]))
            for number in numbers]  # fmt: skip


def warm_up_calls(spec: Spec, count: int) -> list[Call]:
    """Calls that are not counted, of lengths as in the workload, with prompts of their own."""
    trace = scaled(make_workload(spec.workload, seed=spec.seed, requests=count), spec.scale)
    prompts = make_prompts(trace, spec.vocab_size, (spec.seed, 1))
    return [Call(number, _body(spec, trace, number, prompts), 0.0, 0) for number in range(count)]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """When each request is sent [count], seconds: gamma-distributed pauses of which ``burstiness`` is the shape (1: a
    Poisson process; more: more even), scaled so that the last one is sent when it should be on average."""
    if not rate:
        return np.zeros(count)
    pauses = np.random.default_rng([seed, 2]).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(pauses)
    scaled_times: NDArray[np.float64] = times * (count / rate / times[-1])
    return scaled_times


def _model(spec: Spec, number: int) -> str:
    adapters = spec.lora_modules
    if not adapters:
        return spec.model
    if spec.lora_assignment == "round-robin":
        return adapters[number % len(adapters)]
    return adapters[int(np.random.default_rng([spec.seed, 3, number]).integers(len(adapters)))]


def _body(spec: Spec, trace: Trace, number: int, prompts: Sequence[Int32Array]) -> bytes:
    options = {"include_usage": True}
    if spec.continuous_usage:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": _model(spec, number),
        "max_tokens": int(trace.output_tokens[number]),
        "temperature": spec.temperature,
        "stream": True,
        "stream_options": options,
    }
    if spec.ignore_eos:
        body["ignore_eos"] = True
    ids = prompts[number]
    words = WORDS.split()
    text = " ".join(words[token % len(words)] for token in ids.tolist()) if spec.as_text else ""
    if spec.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text if spec.as_text else ids.tolist()
    return orjson.dumps({**body, **spec.extra_body})
