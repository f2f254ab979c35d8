"""What the load generator sends, and what becomes of the answers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from pagebus.actors.bench.driver.client import Outcome
from pagebus.actors.bench.driver.deployment import BenchError
from pagebus.actors.bench.driver.load import Spec, arrivals, make_calls, warm_up_calls
from pagebus.actors.bench.serve import make_figures, make_spec, parse_goodput, parse_percentiles, peak_concurrency
from pagebus.actors.commands.cli import build_parser
from pagebus.actors.settings import SettingsError

SPEC = Spec(base_url="http://x/", backend="openai", endpoint="", model="m", workload="mixed256", requests=9)


def test_processes_split_the_calls() -> None:
    """Several processes send together just what one would send."""
    whole = make_calls(dataclasses.replace(SPEC, rate=5.0))
    parts = [make_calls(dataclasses.replace(SPEC, rate=5.0, processes=4), part=part) for part in range(4)]
    assert sorted((call for part in parts for call in part), key=lambda call: call.number) == whole


def test_bodies_are_streaming_requests() -> None:
    """Prompts as token ids of the workload's lengths; the output's length is fixed."""
    body = json.loads(make_calls(SPEC)[0].body)
    assert set(body) == {"model", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos", "prompt"}
    assert 100 <= len(body["prompt"]) <= 1024
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_chats_and_texts() -> None:
    """Chats have one message, of as many words as the prompt has tokens; added fields win."""
    spec = dataclasses.replace(SPEC, backend="openai-chat", as_text=True, extra_body={"top_k": 3, "temperature": 1})
    ids, body = json.loads(make_calls(SPEC)[2].body)["prompt"], json.loads(make_calls(spec)[2].body)
    assert len(body["messages"][0]["content"].split()) == len(ids)
    assert (body["top_k"], body["temperature"]) == (3, 1)
    assert spec.url == "http://x/v1/chat/completions"


def test_warm_up_shares_no_prompt() -> None:
    """What warms the server up does not fill its prefix cache for the workload."""
    counted = {call.body for call in make_calls(SPEC)}
    assert counted.isdisjoint(call.body for call in warm_up_calls(SPEC, 9))


def test_arrivals_keep_the_rate() -> None:
    """The last request is due when the rate says; burstiness changes how even the pauses are."""
    poisson, even = arrivals(2000, 10.0, 1.0, 0), arrivals(2000, 10.0, 100.0, 0)
    assert poisson[-1] == pytest.approx(200)
    assert even[-1] == pytest.approx(200)
    assert np.diff(poisson).std() == pytest.approx(0.1, rel=0.15)
    assert np.diff(even).std() == pytest.approx(0.01, rel=0.15)
    assert (arrivals(5, 0.0, 1.0, 0) == 0).all()


def parse(*arguments: str) -> Spec:
    """The spec of a command line."""
    return make_spec(build_parser().parse_args(["bench", "serve", *arguments]))


def test_arrivals_are_the_workloads_unless_given() -> None:
    """A workload has a rate or clients of its own; either option replaces both."""
    assert (parse("--workload", "chat").rate, parse("--workload", "chat256").concurrency) == (16.0, 256)
    both = parse("--workload", "chat", "--max-concurrency", "8")
    assert (both.rate, both.concurrency) == (0.0, 8)
    assert parse("--workload", "chat256", "--request-rate", "inf").concurrency == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "nothing"),
        ("--extra-body", "{"),
        ("--extra-body", "[1]"),
        ("--header", "no value"),
        ("--processes", "4", "--max-concurrency", "3"),
    ],
    ids=str,
)
def test_unusable_options_are_refused(arguments: tuple[str, ...]) -> None:
    """What cannot be is said before anything is sent."""
    with pytest.raises(SettingsError, match=arguments[0]):
        parse(*arguments)


def test_goodput_is_spelled_as_elsewhere() -> None:
    """metric:milliseconds, any number of them."""
    assert parse_goodput(["ttft:300", "itl:50"]) == {"ttft": 0.3, "itl": 0.05}
    for wrong in ("ttft", "ttft:x", "speed:1"):
        with pytest.raises(SettingsError, match="goodput"):
            parse_goodput([wrong])


def test_percentiles_are_numbers() -> None:
    """Comma-separated, between 0 and 100."""
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    for wrong in ("", "50,x", "101"):
        with pytest.raises(SettingsError, match="percentiles"):
            parse_percentiles(wrong)


def outcome(number: int, *, sent_s: float, first_s: float, gaps_s: list[float], error: str = "") -> Outcome:
    """A call with a prompt of 10 and a token at the end of every gap."""
    return Outcome(number, sent_s, first_s, first_s + sum(gaps_s), 10, 1 + len(gaps_s), gaps_s, error)


def test_figures_of_the_clients() -> None:
    """Rates over the whole time, latencies of what succeeded, goodput of what met every limit."""
    calls = [
        outcome(0, sent_s=0.0, first_s=0.1, gaps_s=[0.1, 0.1]),
        outcome(1, sent_s=0.0, first_s=0.5, gaps_s=[0.1, 0.4]),
        outcome(2, sent_s=0.0, first_s=0.0, gaps_s=[], error="refused"),
    ]
    figures = make_figures(calls, {"ttft": 0.3, "itl": 0.2}, [50, 99])
    assert figures["seconds"] == pytest.approx(1.0)
    assert (figures["requests"], figures["failed"]) == (2, 1)
    assert figures["output_tokens_per_s"] == pytest.approx(6)
    assert figures["total_tokens_per_s"] == pytest.approx(26)
    assert figures["ttft_ms_p50"] == pytest.approx(300)
    assert figures["tpot_ms_mean"] == pytest.approx((100 + 250) / 2)
    assert figures["itl_ms_p50"] == pytest.approx(100)
    assert figures["e2el_ms_p99"] == pytest.approx(1000, rel=0.01)
    assert figures["good_share"] == pytest.approx(1 / 3)
    assert figures["peak_concurrency"] == 2


def test_calls_one_after_another_are_not_together() -> None:
    """A call that begins as another ends does not count as beside it."""
    calls = [outcome(0, sent_s=0.0, first_s=1.0, gaps_s=[]), outcome(1, sent_s=1.0, first_s=2.0, gaps_s=[])]
    assert peak_concurrency(calls) == 1


def test_nothing_but_failures_is_an_error() -> None:
    """Without a success there is nothing to report."""
    with pytest.raises(BenchError, match="no request succeeded"):
        make_figures([outcome(0, sent_s=0.0, first_s=0.0, gaps_s=[], error="refused")], {}, [50])


def test_requests_name_adapters_in_place_of_the_model() -> None:
    """In turns, or drawn by seed: each is named, and each process of the load names the same for one request."""

    def models(spec: Spec, part: int = 0) -> list[str]:
        return [json.loads(call.body)["model"] for call in make_calls(spec, part=part)]

    spec = dataclasses.replace(SPEC, requests=8, lora_modules=("a", "b", "c"))
    assert models(dataclasses.replace(spec, lora_assignment="round-robin")) == [*"abcabcab"]
    drawn = models(spec)
    assert set(drawn) == {*"abc"}
    assert [models(dataclasses.replace(spec, processes=2), part) for part in (0, 1)] == [drawn[::2], drawn[1::2]]
