"""``metrics`` of an answer, as vLLM's ``--enable-per-request-metrics`` has them: durations and rates of one request."""

from __future__ import annotations

from pagebus.web.calls.call import Call

NAMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def timings_of(call: Call) -> dict[str, float | None]:
    """Milliseconds, and tokens a second, of a call with one choice; of several all are None.

    Times begin with the arrival here, and are seen from here: how long a request was queued is not known.
    """
    told: dict[str, float | None] = dict.fromkeys(NAMES)
    if len(call.choices) != 1 or not call.choices[0].last_token_s:
        return told
    (choice,) = call.choices
    began_s, first_s, last_s = choice.request.started_s, choice.first_token_s, choice.last_token_s
    told["time_to_first_token_ms"] = (first_s - began_s) * 1000
    told["generation_time_ms"] = (last_s - first_s) * 1000
    if choice.num_tokens > 1:
        told["mean_itl_ms"] = (last_s - first_s) / (choice.num_tokens - 1) * 1000
    if last_s > began_s:
        told["tokens_per_second"] = choice.num_tokens / (last_s - began_s)
    return told
