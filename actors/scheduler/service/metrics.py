"""The scheduler's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from operator import attrgetter

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import MOST_LOSSES, Request, Sequence
from pagebus.actors.telemetry.metrics import (
    FINE_BUCKETS_S,
    ITERATION_TOKENS_BUCKETS,
    LATENCY_BUCKETS_S,
    Histogram,
    Metrics,
)
from pagebus.bus.messages import StepPlan

_COUNTERS = {
    "counts.prefix_queries": (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache, once a request.",
    ),
    "counts.prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "host_tier.num_queries": (
        "vllm:external_prefix_cache_queries",
        "Tokens beyond the device's prefix, looked up on the host.",
    ),
    "host_tier.num_hits": ("vllm:external_prefix_cache_hits", "Tokens found in the host tier's prefix cache."),
    "host_tier.num_out": ("pagebus:swapped_out_blocks_total", "Blocks copied from the device to the host."),
    "host_tier.num_in": ("pagebus:swapped_in_blocks_total", "Blocks copied from the host to the device."),
    "disk_tier.num_queries": ("pagebus:disk_cache_queries", "Tokens of prefixes asked of the disk tier."),
    "disk_tier.num_hits": ("pagebus:disk_cache_hits", "Tokens of prefixes read from the disk tier."),
    "disk_tier.num_in": ("pagebus:disk_read_blocks_total", "Blocks read from the disk to the host."),
    "disk_tier.num_out": ("pagebus:disk_written_blocks_total", "Blocks written from the host to the disk."),
    "disk_tier.num_not_read": ("pagebus:disk_failed_reads_total", "Blocks that could not be read, and are computed."),
    "disk_tier.num_not_written": ("pagebus:disk_failed_writes_total", "Blocks that could not be written."),
    "moves.num_pulled": ("pagebus:pulled_blocks_total", "Blocks copied from the cache of another executor."),
    "moves.num_pulled_hosts": ("pagebus:pulled_host_blocks_total", "Those of them that came out of host memory."),
    "moves.num_pulled_tokens": ("pagebus:pulled_tokens_total", "Tokens of prefixes that such blocks lengthened."),
    "moves.num_lent": ("pagebus:lent_blocks_total", "Blocks that others copied from this executor's cache."),
    "moves.num_failed": ("pagebus:failed_pull_blocks_total", "Blocks that could not be copied, and are computed."),
    "counts.num_preemptions": ("vllm:num_preemptions", "Sequences that had to give their blocks up."),
    "counts.num_swaps": ("pagebus:swap_preemptions", "Of these, sequences whose blocks were copied to the host."),
    "counts.num_recomputes": ("pagebus:recompute_preemptions", "Of these, sequences whose tokens are computed again."),
    "counts.num_departures": (
        "pagebus:moved_preemptions",
        "Of these, sequences that were to go on on another executor.",
    ),
    "counts.num_given_back": (
        "pagebus:given_back_blocks_total",
        "Blocks, or pages of blocks, that fell behind a sliding window.",
    ),
    "counts.num_parked": ("pagebus:parked_sequences", "Sequences that left the batch because their listener had gone."),
}


_DRAFTS = {
    "num_drafts": ("vllm:spec_decode_num_drafts", "Rows of steps that verified drafts."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Drafts verified."),
    "num_accepted": ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted."),
}
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by their place behind the last token."

PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class SchedulerMetrics:
    """The scheduler's series; those with the label ``engine`` belong to one replica. ``on_over`` is called when a
    request is over."""

    def __init__(self, metrics: Metrics, on_over: Callable[[], None] = lambda: None) -> None:
        self._metrics = metrics
        self.on_over = on_over
        self._seen: dict[tuple[str, int], dict[str, int]] = {}
        self._waiting = metrics.gauge("vllm:num_requests_waiting", "Sequences waiting for a slot.")
        name, text = "vllm:num_requests_waiting_by_reason", "Sequences waiting for a slot, by what they wait for."
        self._waiting_for_room = metrics.gauge(name, text, reason="capacity")
        name, text = (
            "vllm:request_queue_time_seconds",
            "From the end of tokenizing to the first step planned, a request.",
        )
        self._queue_time = metrics.histogram(name, text, LATENCY_BUCKETS_S, FINE_BUCKETS_S)
        name, text = "vllm:request_prefill_time_seconds", "From the first step planned to the first token, a request."
        self._prefill_time = metrics.histogram(name, text, LATENCY_BUCKETS_S)
        name, text = "vllm:request_inference_time_seconds", "From the first step planned to the last token, a request."
        self._inference_time = metrics.histogram(name, text, LATENCY_BUCKETS_S)
        name, text = "vllm:request_num_preemptions", "How often a request had to give its blocks up."
        self._preemptions = metrics.histogram(name, text, PREEMPTION_BUCKETS)
        self._engines: set[str] = set()
        self._step_tokens: dict[str, Histogram] = {}
        self.failed = metrics.counter("pagebus:scheduler_failed_requests", "Requests ended with an error here.")
        self.dead = metrics.counter("pagebus:scheduler_dead_letters", "Messages that could not be processed here.")
        self.busy = metrics.counter("pagebus:scheduler_busy_seconds_total", "Seconds of taking in, planning, sending.")
        self.refused_results = metrics.counter("pagebus:scheduler_false_results", "Executors shut out for a result.")

    def planned(self, engine: str, plan: StepPlan) -> None:
        """Count one planned step."""
        tokens = int(plan.num_scheduled.sum())
        if tokens:
            if (seen := self._step_tokens.get(engine)) is None:
                name, text = "vllm:iteration_tokens_total", "Tokens per step."
                seen = self._metrics.histogram(name, text, ITERATION_TOKENS_BUCKETS, engine=engine)
                self._step_tokens[engine] = seen
            seen.observe(tokens)

    def lost(self, engine: str, error: str) -> None:
        """Count a lost executor; ``error`` is the one that it reported, if any."""
        name, text = "pagebus:lost_executors_total", "Executors that are gone, by the error they said they ended with."
        self._metrics.counter(name, text, engine=engine, error=error).inc()

    def over(self, request: Request) -> None:
        """Observe the times of a finished request, unless it is a job. Clocks of tokenizers may differ a little."""
        if request.first_token_s and request.priority_class != JOB:
            self._queue_time.observe(max(0.0, request.started_s - request.tokenized_s))
            self._prefill_time.observe(max(0.0, request.first_token_s - request.started_s))
            if request.ended_s:  # else it was given up before its last token
                self._inference_time.observe(max(0.0, request.ended_s - request.started_s))
            self._preemptions.observe(request.num_preemptions)
        self.on_over()

    def update(self, core: Core) -> None:
        """Set the gauges from the core's state."""
        self._waiting.set(len(core.waiting))
        self._waiting_for_room.set(len(core.waiting))
        for name in self._engines - core.replicas.keys():
            self._metrics.drop(engine=name)
        self._engines = set(core.replicas)
        for name, replica in core.replicas.items():
            pool = replica.pool
            usage, host_usage = 1 - pool.num_free / pool.num_blocks, replica.host_tier.pool.usage
            self._show(name, len(replica.slots), usage, host_usage, replica.adapters.resident)
            if replica.disk_tier.is_on:
                self._show_disk(name, replica.disk_tier.pool.usage)
            self.count(replica)
        self._show_adapters(core)

    def _show_adapters(self, core: Core) -> None:
        """As vLLM does: names as labels, and the time as the value. Nothing where no replica takes adapters."""
        places = max((replica.adapters.capacity for replica in core.replicas.values()), default=0)
        if not places:
            return
        running = (sequence for replica in core.replicas.values() for sequence in replica.slots.occupied())
        labels = {"max_lora": str(places), "running_lora_adapters": _adapters(running)}
        labels["waiting_lora_adapters"] = _adapters(core.waiting)
        name, text = "vllm:lora_requests_info", "When these adapters had sequences that ran or waited, in Unix seconds."
        self._metrics.only_gauge(name, text, **labels).set(time.time())

    def count(self, replica: Replica) -> None:
        """Add a replica's counts since the last call; call it also before the replica leaves."""
        for attribute, (name, text) in _COUNTERS.items():
            self._add(replica, attribute, name, text, int(attrgetter(attribute)(replica)))
        if not replica.slots.num_drafts:
            return
        acceptance = replica.step_results.acceptance
        for attribute, (name, text) in _DRAFTS.items():
            self._add(replica, attribute, name, text, getattr(acceptance, attribute))
        for place, value in enumerate(acceptance.accepted_at):
            self._add(replica, f"accepted at {place}", *_ACCEPTED_AT, value, position=str(place))

    def _add(self, replica: Replica, key: str, name: str, text: str, value: int, **labels: str) -> None:
        """Add what came to ``value`` since the last call."""
        seen = self._seen.setdefault((replica.name, replica.epoch), {})
        self._metrics.counter(name, text, engine=replica.name, **labels).inc(value - seen.get(key, 0))
        seen[key] = value

    def drop(self, engine: str) -> None:
        """Take away the series of an executor that stays away: where names are used once, they would only grow."""
        self._metrics.drop_all(engine=engine)
        self._step_tokens.pop(engine, None)

    def forget(self, replica: Replica) -> None:
        """Drop a replica that has left. Its sequences go on elsewhere, unless they have lost too many executors."""
        self.count(replica)
        resumed = sum(each.num_losses + 1 < MOST_LOSSES for each in replica.slots.occupied())
        name, text = "pagebus:resumed_sequences_total", "Sequences whose executor was lost, and that go on elsewhere."
        self._metrics.counter(name, text, engine=replica.name).inc(resumed)
        del self._seen[replica.name, replica.epoch]

    def _show_disk(self, engine: str, usage: float) -> None:
        name, text = "pagebus:disk_cache_usage_perc", "Share of the disk tier's blocks in use (0 to 1)."
        self._metrics.gauge(name, text, engine=engine).set(usage)

    def _show(
        self, engine: str, running: int, usage: float, host_usage: float, adapters: list[tuple[str, list[int]]]
    ) -> None:
        gauge = self._metrics.gauge
        gauge("vllm:num_requests_running", "Sequences that have a slot.", engine=engine).set(running)
        gauge("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use (0 to 1).", engine=engine).set(usage)
        name, text = "pagebus:host_cache_usage_perc", "Share of the host tier's blocks with content (0 to 1)."
        gauge(name, text, engine=engine).set(host_usage)
        name, text = "pagebus:resident_adapters", "Adapters in blocks of the device's cache, used or not."
        gauge(name, text, engine=engine).set(len(adapters))
        name, text = "pagebus:adapter_blocks", "Blocks of the device's cache that these adapters take."
        gauge(name, text, engine=engine).set(sum(len(blocks) for _, blocks in adapters))


def _adapters(sequences: Iterable[Sequence]) -> str:
    """The names of their adapters, in order and with commas."""
    found = {each.request.adapter.name for each in sequences if each.request.adapter is not None}
    return ",".join(sorted(found))
