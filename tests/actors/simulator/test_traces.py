"""Workloads, trace files, histograms and profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pagebus.actors.simulator.fit import fit, main
from pagebus.actors.simulator.histogram import Histogram
from pagebus.actors.simulator.profile import Profile, ProfileError, load_profile, names, to_json
from pagebus.actors.simulator.recording.trace import TraceError, make_trace, read_trace, write_trace
from pagebus.actors.simulator.workloads import WORKLOADS, make_workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_repeat(name: str, tmp_path: Path) -> None:
    """A workload is the same for the same seed, and survives a file."""
    first, again = (make_workload(name, seed=3) for _ in range(2))
    assert len(first) == WORKLOADS[name].requests
    path = tmp_path / "trace.jsonl"
    write_trace(path, first)
    for column in ("prompt_tokens", "output_tokens", "max_tokens", "prefix_groups", "prefix_tokens", "choices"):
        assert np.array_equal(getattr(first, column), getattr(again, column))
        assert np.array_equal(getattr(first, column), getattr(read_trace(path), column))
    assert np.allclose(read_trace(path).arrival_s, first.arrival_s, atol=1e-6)


def test_workloads_are_what_their_names_say() -> None:
    """Lengths have the distribution that the benchmarks define."""
    mixed = make_workload("mixed256", requests=20_000)
    assert (mixed.prompt_tokens.min(), mixed.output_tokens.max()) == (100, 1024)
    chat = make_workload("chat1000", requests=20_000)
    assert np.median(chat.prompt_tokens) == pytest.approx(150, rel=0.03)
    assert np.log(chat.output_tokens[chat.output_tokens < 2048]).std() == pytest.approx(0.9, rel=0.03)
    assert (chat.prompt_tokens.min(), chat.prompt_tokens.max()) == (4, 2048)
    poisson = make_workload("chat", requests=20_000, rate=50.0)
    assert poisson.arrival_s[-1] == pytest.approx(400, rel=0.03)
    assert make_workload("chat256").clients == 256
    assert set(make_workload("shared-prefix").prefix_tokens) == {2048}


def test_trace_files(tmp_path: Path) -> None:
    """Optional fields have defaults, step lines and a byte order mark are passed over, and requests are sorted by
    arrival."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"pagebus_trace": 1, "block_size": 32},
        {"arrival_s": 2, "prompt_tokens": 70, "output_tokens": 3, "blocks": [5, 6], "n": 2, "priority": -1, "job": 1},
        {"step": 1, "replica": "a"},
        {"arrival_s": 1, "prompt_tokens": 40, "output_tokens": 4, "max_tokens": 9, "prefix": ["tools", 32]},
    ]
    path.write_text("\ufeff" + "\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == [1, 2]
    assert trace.max_tokens.tolist() == [9, 3]
    assert trace.prefix_groups.tolist() == [2**20, -1]
    assert (trace.choices.tolist(), trace.priorities.tolist(), trace.jobs.tolist()) == ([1, 2], [0, -1], [0, 1])
    assert (trace.blocks, trace.block_size) == ({1: (5, 6)}, 32)


REQUEST = {"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 1}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"a": 1}',
        "",
        *(
            json.dumps(REQUEST | changed)
            for changed in (
                {"prompt_tokens": 0},
                {"arrival_s": float("nan")},
                {"max_tokens": 0},
                {"n": 0},
                {"priority": "high"},
                {"prefix": "abc"},
                {"prefix": 5},
                {"prefix": [2**20, 4]},
                {"blocks": 5},
                {"blocks": ["a"]},
            )
        ),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, line: str) -> None:
    """What is wrong is named with its line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match="line 1" if line else "no requests"):
        read_trace(path)
    with pytest.raises(TraceError):
        make_trace(0, 1)


def test_nulls_of_traces_are_what_is_left_out(tmp_path: Path) -> None:
    """Other programs write them for fields without a value."""
    path = tmp_path / "trace.jsonl"
    nulls = dict.fromkeys(("max_tokens", "priority", "n", "job", "prefix", "blocks"))
    path.write_text(json.dumps(REQUEST | nulls))
    trace = read_trace(path)
    columns = (trace.max_tokens, trace.priorities, trace.choices, trace.jobs, trace.prefix_groups)
    assert [column.tolist() for column in columns] == [[1], [0], [1], [0], [-1]]
    assert trace.blocks == {}


def test_histogram_percentiles() -> None:
    """Percentiles are exact within 0.2%, over buffers of any number."""
    histogram, rng = Histogram(), np.random.default_rng(0)
    values = rng.lognormal(-4, 1.5, 200_000)
    for part in np.array_split(values, 50):
        histogram.add_all(part)
    histogram.add(float(values.mean()))
    assert histogram.count == 200_001
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=3e-3)
    assert (histogram.percentile(0), histogram.percentile(1)) == (values.min(), values.max())
    assert histogram.mean == pytest.approx(values.mean(), rel=1e-6)
    assert Histogram().percentile(0.5) == 0


def test_profiles_are_checked(tmp_path: Path) -> None:
    """Unknown names and wrong files are refused with a reason; what was stored is read back."""
    assert {"h200-llama8b", "h200-qwen06b"} <= set(names())
    with pytest.raises(ProfileError, match="neither a file nor one of h200"):
        load_profile("nonsense")
    path = tmp_path / "profile.json"
    path.write_text(to_json(load_profile("h200-llama8b")))
    assert load_profile(str(path)) == load_profile("h200-llama8b")
    text = path.read_text()
    for wrong in (
        "[]",
        "{}",
        text.replace('"kv_read_bytes_per_s": ', '"kv_read_bytes_per_s": -'),
        text.replace('"window": 0', '"window": -1'),
        text.replace('"windowed_pages": 0', '"windowed_pages": 2'),
        text.replace('"windowed_pages": 0', '"windowed_pages": 0.5'),
    ):
        assert wrong != text
        path.write_text(wrong)
        with pytest.raises(ProfileError):
            load_profile(str(path))


def steps_of(profile: Profile, rng: np.random.Generator, count: int) -> list[dict[str, float]]:
    """Steps as a device of that profile would take them, with 2% of noise and a hiccup now and then."""
    base_s, steps = profile.base_table_s(8192), []
    for _ in range(count):
        decodes = int(rng.integers(1, 257))
        prefill = int(rng.choice([0, 0, 100, 700, 3000]))
        context, pairs = decodes * int(rng.integers(100, 2000)), prefill * (prefill / 2 + int(rng.integers(0, 4000)))
        seconds = base_s[decodes + prefill] + context * profile.kv_token_s + pairs * profile.pair_s
        seconds *= rng.normal(1, 0.02) * (3 if rng.random() < 0.02 else 1)
        step = {"decodes": decodes, "decode_context": context, "prefill_tokens": prefill, "prefill_pairs": pairs}
        steps.append({**step, "seconds": seconds, "planned_s": 0.0, "received_s": 0.0002})
    return steps


def test_fit_finds_the_device() -> None:
    """From the steps of another device its profile is found, whatever the base was."""
    base = load_profile("h200-qwen06b")
    truth = load_profile("h200-llama8b")
    steps = steps_of(truth, np.random.default_rng(0), 3000)
    found, errors = fit(base, steps)
    assert np.median(np.abs(errors)) < 0.03
    assert found.kv_token_s * base.kv_bytes_per_token == pytest.approx(
        truth.kv_token_s * base.kv_bytes_per_token, rel=0.1
    )
    expected, got = truth.base_table_s(4096), found.base_table_s(4096)
    assert [got[at] for at in (32, 200, 900, 3100)] == pytest.approx(
        [expected[at] for at in (32, 200, 900, 3100)], rel=0.08
    )
    assert found.bus_s == 0.0002


def test_fit_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording goes in, a profile comes out; too little data is an error."""
    recording, out = tmp_path / "run.jsonl", tmp_path / "profile.json"
    now_s, lines = 0.0, []
    for number, step in enumerate(steps_of(load_profile("h200-llama8b"), np.random.default_rng(1), 200), 1):
        seconds = step.pop("seconds")
        times = {"launched_s": now_s, "done_s": now_s + seconds, "swapped_in": 0}
        lines.append(json.dumps({**step, **times, "step": number, "replica": "a"}))
        now_s += seconds
    recording.write_text("\n".join(lines))
    assert main([str(recording), "--base", "h200-llama8b", "--out", str(out)]) == 0
    assert load_profile(str(out)).base_ms[0] == pytest.approx(4.4, rel=0.2)
    recording.write_text(lines[0])
    assert main([str(recording), "--base", "h200-llama8b"]) == 2
    assert "too few" in capsys.readouterr().err


def test_a_profile_with_windows_is_not_fitted() -> None:
    """A log of steps does not tell what layers with windows read."""
    with pytest.raises(ProfileError, match="cannot be fitted"):
        fit(dataclasses.replace(load_profile("h200-llama8b"), window=100), [])
