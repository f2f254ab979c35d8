"""The workloads of the engine benchmark, and which of them share a deployment."""

from __future__ import annotations

import pytest

from pagebus.actors.bench.driver.fitting import fitted, longest
from pagebus.actors.bench.driver.points import make_workloads
from pagebus.actors.bench.engine import by_settings, chosen
from pagebus.actors.settings import Settings, SettingsError


def test_decode_steps_of_the_whole_batch() -> None:
    """Outputs are as much longer than the steps to be counted as prompts take to be read."""
    (one, many) = make_workloads(batches=[1, 256], budget=8192)["decode"].points
    assert (one.batch, many.batch) == (1, 256)
    assert set(one.trace.output_tokens) == {130}
    assert set(many.trace.output_tokens) == {128 + 16 + 1}
    assert set(many.trace.prompt_tokens) == {512}


def test_published_sizes() -> None:
    """Without changes the workloads are those that vLLM was measured with."""
    workloads = make_workloads(batches=[1])
    assert len(workloads["mixed256"].points[0].trace) == 256
    assert workloads["mixed256"].points[0].temperature == 0.6
    assert len(workloads["chat1000"].points[0].trace) == 1000
    assert workloads["prefill"].points[0].trace.prompt_tokens.tolist() == [2048] * 64
    assert [point.trace.prompt_tokens.tolist() for point in workloads["prefix"].points] == [[15_064]] * 2
    lengths = [point.trace.prompt_tokens.tolist() for point in workloads["longctx"].points]
    assert lengths == [[8192], [32_768], [130_944], [32_768] * 8]


def test_requests_fit_the_context_they_are_served_with() -> None:
    """No prompt and its output are longer than the deployment takes."""
    for workload in make_workloads(batches=[256]).values():
        for trace in (point.trace for point in workload.points):
            assert (trace.prompt_tokens + trace.output_tokens).max() <= workload.settings["max_model_len"]


def test_workloads_with_equal_settings_share_a_deployment() -> None:
    """One start serves all workloads that want the same of it."""
    groups = by_settings(make_workloads(batches=[1]), Settings(), [])
    assert [names for _, names in groups] == [
        ["decode", "mixed256", "chat1000", "prefill"], ["prefix"], ["swap"], ["longctx"]
    ]  # fmt: skip
    assert [settings.max_model_len for settings, _ in groups] == [8192, 16_384, 32_768, 131_072]


def test_given_settings_go_before_those_of_a_workload() -> None:
    """What the user asks for is served, even if it is the default."""
    workloads = chosen(make_workloads(batches=[1]), ["mixed256"])
    ((settings, _),) = by_settings(workloads, Settings(max_model_len=2048), ["enable_prefix_caching"])
    assert (settings.max_model_len, settings.enable_prefix_caching) == (2048, True)


def test_unknown_workloads_are_refused() -> None:
    """With the names of those there are."""
    with pytest.raises(SettingsError, match="no workload 'fast': there are decode, mixed256"):
        chosen(make_workloads(batches=[1]), ["fast"])


def test_workloads_that_the_model_is_too_short_for_say_which_scale_fits() -> None:
    """The shipped model has 1,024 positions: what fits is served with as many, and a longer one names the scale with
    which all fit."""
    workloads = make_workloads(batches=[1])
    assert fitted(chosen(workloads, ["decode"]), Settings(), 1.0)["decode"].settings["max_model_len"] == 1024
    for scale, names in ((1.0, ["decode", "prefill"]), (0.7, list(workloads))):
        with pytest.raises(SettingsError, match="the context holds 1024; --scale ") as refused:
            fitted(chosen(make_workloads(batches=[1], scale=scale), names), Settings(), scale)
        told = float(str(refused.value).partition("--scale ")[2].split()[0])
        found = fitted(chosen(make_workloads(batches=[1], scale=told), names), Settings(), told)
        assert 900 < max(map(longest, found.values())) <= 1024
    with pytest.raises(SettingsError, match=r"the context holds 500; --scale 0\.24 "):
        fitted(chosen(workloads, ["prefill"]), Settings(max_model_len=500), 1.0)
