"""The ingress's own metrics, under vLLM's names, and the text of ``/metrics`` for the whole deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagebus.actors.runtime.actor import actor_of, metrics_state
from pagebus.actors.telemetry.metrics import (
    FINE_BUCKETS_S,
    LATENCY_BUCKETS_S,
    TOKEN_LATENCY_BUCKETS_S,
    TTFT_BUCKETS_S,
    Metrics,
    of_actor,
    render,
    token_buckets,
)
from pagebus.bus.contract import Bus, BusUnavailable, LeaseInfo
from pagebus.web.calls.call import Choice, OpenRequest

HTTP_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
"""Names of metrics in dashboards for earlier versions of vLLM."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PROBES = frozenset({"/health", "/readyz", "/livez", "/ping"})
"""Routes whose 503 is the answer to the question, and no request that failed."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEFAULT_MAX_TOKENS = 131072
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
REJECTIONS = {
    "requests": "max_num_queued_reqs",
    "tokens": "max_num_queued_tokens",
    "tokens per minute": "tokens_per_minute",
    "": "other",
}
"""vLLM's name of a limit, by the quantity that exceeded it here."""


class _Times:
    """Histograms of seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self.first_token = metrics.histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            TTFT_BUCKETS_S,
            FINE_BUCKETS_S,
        )
        self.inter_token = metrics.histogram(
            "vllm:inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            TOKEN_LATENCY_BUCKETS_S,
            FINE_BUCKETS_S,
        )
        self.whole = metrics.histogram(
            "vllm:e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            LATENCY_BUCKETS_S,
            FINE_BUCKETS_S,
        )
        self.decode = metrics.histogram(
            "vllm:request_decode_time_seconds",
            "Time from the first token of a choice to its last, in seconds.",
            LATENCY_BUCKETS_S,
        )
        self.per_token = metrics.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a choice, in seconds.",
            TOKEN_LATENCY_BUCKETS_S,
        )


class _Sizes:
    """Histograms of tokens and of parameters, per request."""

    def __init__(self, metrics: Metrics, max_model_len: int) -> None:
        buckets = token_buckets(max_model_len)
        self.prompt = metrics.histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", buckets)
        self.computed = metrics.histogram(
            "vllm:request_prefill_kv_computed_tokens", "Number of a prompt's tokens that no cache had.", buckets
        )
        self.generation = metrics.histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", buckets
        )
        self.longest = metrics.histogram(
            "vllm:request_max_num_generation_tokens", "Number of tokens of a request's longest choice.", buckets
        )
        self.params_n = metrics.histogram(
            "vllm:request_params_n", "Histogram of the parameter n, per request.", PARAMS_N_BUCKETS
        )
        self.params_max_tokens = metrics.histogram(
            "vllm:request_params_max_tokens", "Histogram of the parameter max_tokens, where set.", buckets
        )

    def of_prompt(self, request: OpenRequest) -> None:
        """A prompt has been computed."""
        self.prompt.observe(request.num_prompt_tokens)
        self.computed.observe(request.num_prompt_tokens - request.num_cached_tokens)


class IngressMetrics:
    """Metrics of requests as the ingress sees them. Times are of the monotonic clock."""

    def __init__(self, metrics: Metrics, max_model_len: int | None = None) -> None:
        self._metrics = metrics
        self._prompt_tokens = metrics.counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._cached_tokens = metrics.counter(
            "vllm:prompt_tokens_cached", "Number of prompt tokens that were found in a cache."
        )
        self._generation_tokens = metrics.counter("vllm:generation_tokens", "Number of generation tokens processed.")
        self._times, self._sizes = _Times(metrics), _Sizes(metrics, max_model_len or DEFAULT_MAX_TOKENS)
        self.open_requests = metrics.gauge("pagebus:open_requests", "Requests under way at the ingresses.")
        self.open_tokens = metrics.gauge("pagebus:open_tokens", "Tokens charged for requests under way.")
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._success(reason, 0)
        for what in REJECTIONS:
            self.rejected(what, 0)

    def _success(self, reason: str, count: int = 1) -> None:
        self._metrics.counter(
            "vllm:request_success", "Count of successfully processed requests.", finished_reason=reason
        ).inc(count)

    def tokens(self, choice: Choice, request: OpenRequest, num_tokens: int, now_s: float) -> None:
        """``choice`` has ``num_tokens`` now; each is counted once."""
        new_tokens = num_tokens - choice.num_counted
        if new_tokens <= 0:
            return
        first = self._count(choice, request, num_tokens)
        if choice.last_token_s:
            self._times.inter_token.observe((now_s - choice.last_token_s) / new_tokens, new_tokens)
        else:
            choice.first_token_s, choice.first_tokens = now_s, num_tokens
            if first:
                self._times.first_token.observe(now_s - request.started_s)
        choice.last_token_s = now_s

    def _count(self, choice: Choice, request: OpenRequest, num_tokens: int) -> bool:
        """Count what is new of ``num_tokens``, the first time with the prompt: whether it is. Tokens that nobody is
        shown are none, as in ``usage``."""
        first = not choice.num_counted and not request.first_token_seen
        if first:
            request.first_token_seen = True
            self._prompt_tokens.inc(request.num_prompt_tokens)
            self._cached_tokens.inc(request.num_cached_tokens)
        if request.shows_output:
            self._generation_tokens.inc(num_tokens - choice.num_counted)
        choice.num_counted = num_tokens
        return first

    def choice_finished(self, choice: Choice, reason: str, num_tokens: int) -> None:
        self._success(reason)
        self._sizes.generation.observe(num_tokens if choice.request.shows_output else 0)
        if choice.last_token_s:
            decode_s, later = choice.last_token_s - choice.first_token_s, num_tokens - choice.first_tokens
            self._times.decode.observe(decode_s)
            if later > 0:
                self._times.per_token.observe(decode_s / later)

    def request_finished(self, request: OpenRequest, now_s: float) -> None:
        self._sizes.of_prompt(request)
        shown = request.shows_output
        self._sizes.longest.observe(max(choice.num_tokens for choice in request.choices) if shown else 0)
        self._times.whole.observe(now_s - request.started_s)
        if request.message is not None:
            self._sizes.params_n.observe(request.message.sampling.n)
            if shown and request.message.sampling.max_tokens is not None:
                self._sizes.params_max_tokens.observe(request.message.sampling.max_tokens)

    def aborted(self, request: OpenRequest) -> None:
        self._success("abort", request.num_unfinished)

    def failed(self, request: OpenRequest) -> None:
        self._success("error", request.num_unfinished)

    def rejected(self, what: str, count: int = 1) -> None:
        """Calls had to be refused (429): there was too much of ``what``."""
        text = "Calls refused because too much is under way, by what there is too much of."
        reason = REJECTIONS.get(what, "other")
        self._metrics.counter("vllm:admission_rejections", text, reason=reason).inc(count)

    def error(self, status: int) -> None:
        """A client was told of an error: as a status, or as an event of a stream that had begun."""
        name, text = "pagebus:errors", "Error responses by status; 499 counts clients that disconnected."
        self._metrics.counter(name, text, status=str(status)).inc()

    def http(self, method: str, handler: str, status: int, took_s: float) -> None:
        """One HTTP request was answered by the route ``handler``, to the end."""
        method = method if method in METHODS else "other"
        self._metrics.counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            method=method,
            handler=handler,
            status=f"{status // 100}xx",
        ).inc()
        if status >= 400 and handler not in PROBES:
            self.error(status)
        name, text = "http_request_duration_seconds", "Seconds until the end of an answer, by method and handler."
        self._metrics.histogram(name, text, HTTP_BUCKETS_S, method=method, handler=handler).observe(took_s)


async def deployment_metrics(bus: Bus, leases: Iterable[LeaseInfo], own: str, own_snapshot: Mapping[str, Any],
                             model_name: str) -> str:  # fmt: skip
    """Prometheus text over all live actors; only the ingress's own while the bus is away."""
    names = {metrics_state(lease.kind, actor_of(lease)): actor_of(lease) for lease in leases}
    names.pop(metrics_state("ingress", own), None)
    try:
        snapshots = await bus.get_state(*names) if names else []
    except BusUnavailable:
        snapshots = []
    told = [(own, own_snapshot), *zip(names.values(), snapshots, strict=False)]
    known = [of_actor(with_old_names(snapshot), name) for name, snapshot in told if snapshot is not None]
    return render(known, {"model_name": model_name})


def with_old_names(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot in which some metrics are there a second time."""
    families, series = snapshot["families"], snapshot["series"]
    again = {OLD_NAMES[name]: family for name, family in families.items() if name in OLD_NAMES}
    repeated = [[OLD_NAMES[name], labels, data] for name, labels, data in series if name in OLD_NAMES]
    return {"families": {**families, **again}, "series": [*series, *repeated]}
