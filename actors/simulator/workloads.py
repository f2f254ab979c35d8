"""Workloads with names: the same requests for every run with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebus.actors.simulator.recording.trace import Ints, Trace, make_trace

CHAT_MEDIAN, CHAT_SIGMA, CHAT_LEAST, CHAT_MOST = 150, 0.9, 4, 2048


def chat_lengths(rng: np.random.Generator, count: int) -> Ints:
    """Log-normal lengths in tokens [count], as of chat prompts and answers."""
    lengths = rng.lognormal(np.log(CHAT_MEDIAN), CHAT_SIGMA, count)
    return np.clip(np.rint(lengths), CHAT_LEAST, CHAT_MOST).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests``, ``rate`` (per second; 0: all at once) and ``clients`` (above 0: as many at a time) are defaults.
    ``lengths`` returns prompt and output tokens, and maybe other columns of the trace."""

    text: str
    requests: int
    lengths: Callable[[np.random.Generator, int], tuple[Any, Any, dict[str, Any]]]
    rate: float = 0.0
    clients: int = 0


def _mixed(rng: np.random.Generator, count: int) -> tuple[Any, Any, dict[str, Any]]:
    return rng.integers(100, 1025, count), rng.integers(100, 1025, count), {}


def _chat(rng: np.random.Generator, count: int) -> tuple[Any, Any, dict[str, Any]]:
    return chat_lengths(rng, count), chat_lengths(rng, count), {}


def _fixed(prompt: int, output: int, **columns: Any) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    return lambda _, count: (np.full(count, prompt), np.full(count, output), dict(columns))


def _longctx(_: np.random.Generator, count: int) -> tuple[Any, Any, dict[str, Any]]:
    return np.resize([8_192, 32_768, 130_944], count), np.full(count, 128), {}


def _chats(rng: np.random.Generator, count: int) -> tuple[Any, Any, dict[str, Any]]:
    """Eight system prompts of 1024 tokens, by popularity, each followed by an individual message."""
    groups = np.minimum(rng.geometric(0.4, count), 8) - 1
    prefix = {"prefix_groups": groups, "prefix_tokens": 1024}
    return 1024 + chat_lengths(rng, count), chat_lengths(rng, count), prefix


WORKLOADS = {
    "mixed256": Workload("256 at once, prompt and output each uniform 100 to 1024", 256, _mixed),
    "chat1000": Workload("1000 at once, prompt and output log-normal, median 150, sigma 0.9, 4 to 2048", 1000, _chat),
    "prefill": Workload("64 prompts of 2048 at once, 1 token out", 64, _fixed(2048, 1)),
    "single": Workload("1 client, 512 in, 128 out", 20, _fixed(512, 128), clients=1),
    "chat": Workload("chat lengths, Poisson arrivals, 16 per second", 1000, _chat, rate=16.0),
    "chat256": Workload("256 clients, chat lengths", 1000, _chat, clients=256),
    "long4k": Workload("32 clients, 4096 in, 128 out", 256, _fixed(4096, 128), clients=32),
    "shared-prefix": Workload(
        "32 clients, a shared prefix of 2048 and 128 more in, 64 out",
        512,
        _fixed(2176, 64, prefix_groups=0, prefix_tokens=2048),
        clients=32,
    ),
    "system-prompts": Workload(
        "chats behind one of eight system prompts of 1024, 16 per second", 1000, _chats, rate=16.0
    ),
    "longctx": Workload("1 client, prompts of 8192, 32768 and 130944, 128 out", 6, _longctx, clients=1),
}


def make_workload(
    name: str, *, seed: int = 0, requests: int | None = None, rate: float | None = None, clients: int | None = None
) -> Trace:
    """The trace of a workload.

    Args:
        rate: Poisson arrivals per second; 0: all at once.
        clients: how many requests are under way at a time, in place of arrivals; 0: by arrival.

    Raises:
        KeyError: there is no such workload.
    """
    workload = WORKLOADS[name]
    count = workload.requests if requests is None else requests
    rng = np.random.default_rng(seed)
    prompts, outputs, columns = workload.lengths(rng, count)
    if rate is None:
        rate = workload.rate
    if clients is None:
        clients = 0 if rate != workload.rate else workload.clients
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count)) if rate > 0 and not clients else 0.0
    return make_trace(prompts, outputs, arrivals, clients=clients, **columns)
