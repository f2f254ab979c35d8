"""Metrics of the jobs actor. They count tokens but no latencies, because no client waits for a job."""

from __future__ import annotations

from pagebus.actors.telemetry.metrics import Metrics
from pagebus.web.calls.call import Choice, OpenRequest
from pagebus.web.telemetry.metrics import IngressMetrics

OUTCOMES = ("completed", "failed", "cancelled")


class JobMetrics(IngressMetrics):
    """Like the ingress's, without times: those would hide what interactive clients see."""

    def __init__(self, metrics: Metrics, max_model_len: int | None = None) -> None:
        super().__init__(metrics, max_model_len)
        self.queued = metrics.gauge("pagebus:jobs_queued", "Entries of the stream of jobs, those under way included.")
        self.running = metrics.gauge("pagebus:jobs_running", "Jobs under way at the jobs actors.")
        for outcome in OUTCOMES:
            self.outcome(outcome, 0)

    def outcome(self, outcome: str, count: int = 1) -> None:
        self._metrics.counter("pagebus:jobs", "Jobs and lines of batches answered, by outcome.", outcome=outcome).inc(
            count
        )

    def tokens(self, choice: Choice, request: OpenRequest, num_tokens: int, now_s: float) -> None:
        if num_tokens > choice.num_counted:
            self._count(choice, request, num_tokens)

    def request_finished(self, request: OpenRequest, now_s: float) -> None:
        self._sizes.of_prompt(request)
