"""What a jobs actor counts."""

from __future__ import annotations

from pagebus.actors.telemetry.metrics import Metrics, render
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.call import Call
from pagebus.web.jobs.metrics import JobMetrics


def counted(details: AnswerDetails | None = None) -> list[str]:
    """The tokens that are counted for a job of a prompt of 5 and two choices, each told of at 1, 3, 3 and 4 tokens."""
    metrics = Metrics()
    told = JobMetrics(metrics)
    call = Call(["a"], 2, streaming=False, now_s=0.0)
    call.show(details)
    (request,) = call.requests
    request.num_prompt_tokens, request.num_cached_tokens = 5, 2
    for num_tokens in (1, 3, 3, 4):
        for choice in request.choices:
            told.tokens(choice, request, num_tokens, 1.0)
    lines = render([metrics.snapshot()]).splitlines()
    names = ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total")
    return [line for name in names for line in lines if line.startswith(name)]


def test_each_token_is_counted_once() -> None:
    """However often a reply says how many there are by now."""
    expected = ["vllm:prompt_tokens_total 5.0", "vllm:prompt_tokens_cached_total 2.0"]
    assert counted() == [*expected, "vllm:generation_tokens_total 8.0"]


def test_tokens_that_nobody_is_shown_are_not_counted() -> None:
    """Those of embeddings, and of a prompt that is only scored."""
    assert counted(AnswerDetails(prompt_only=True))[-1] == "vllm:generation_tokens_total 0.0"
