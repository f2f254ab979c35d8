"""`pagebus top`: what a frame shows."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from pagebus.actors.commands.cli import main
from pagebus.actors.commands.terminal.frame import View
from pagebus.bus.messages import StateRequested
from tests.web.observatory.test_board import state


def test_one_frame(options, server, monkeypatch, capsys) -> None:
    """Actors, streams, and the replica's blocks as the scheduler tells them."""
    told = state({7: [0, 1]}, cached=[3])
    monkeypatch.setattr(server.backend, "answer", lambda asked: told if isinstance(asked, StateRequested) else None)
    assert main(["top", *options, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Pagebus ")
    assert lines[0].endswith("fake-model")
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.split()}
    assert rows["gpu-0"] == ["0", "0", "0", "0", "12", "12", "1", "0", "-", "0", "0", "0", "-", "-", "-"]
    assert rows["ingress-0"][0] == "ready"
    assert rows["requests"] == ["0"]


def test_drafts(options, server, monkeypatch, capsys) -> None:
    """How many an executor that speculates has verified, and the share that was right."""
    told = state({7: [0, 1]})
    drafting = replace(told.replicas[0], most_drafts=4, num_drafted=200, num_accepted=50)
    told = replace(told, replicas=(drafting,))
    monkeypatch.setattr(server.backend, "answer", lambda asked: told if isinstance(asked, StateRequested) else None)
    assert main(["top", *options, "--once"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-0"))
    assert row[-3:-1] == ["200", "25%"]


def test_pulled_blocks(options, server, monkeypatch, capsys) -> None:
    """How many blocks came from other executors' caches, in the column of that name."""
    told = state({7: [0, 1]})
    told = replace(told, replicas=(replace(told.replicas[0], pulled_blocks=123),))
    monkeypatch.setattr(server.backend, "answer", lambda asked: told if isinstance(asked, StateRequested) else None)
    assert main(["top", *options, "--once"]) == 0
    head, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("replica ", "gpu-0 ")))
    end = head.index("pulled") + len("pulled")
    assert row[:end].split()[-1] == "123"
    assert row[end] == " "


def test_roles(options, server, monkeypatch, capsys) -> None:
    """Behind the name, where there are any."""
    told = state({7: [0, 1]})
    told = replace(told, replicas=(replace(told.replicas[0], role="prefill"),))
    monkeypatch.setattr(server.backend, "answer", lambda asked: told if isinstance(asked, StateRequested) else None)
    assert main(["top", *options, "--once"]) == 0
    assert "\ngpu-0 (prefill) " in capsys.readouterr().out


def test_adapters(options, server, monkeypatch, capsys) -> None:
    """How many are on the device, and in how many of its blocks."""
    told = state({7: [0, 1]})
    adapted = replace(told.replicas[0], most_adapters=4, adapters=("sql", "legal"), num_adapter_blocks=80)
    told = replace(told, replicas=(adapted,))
    monkeypatch.setattr(server.backend, "answer", lambda asked: told if isinstance(asked, StateRequested) else None)
    assert main(["top", *options, "--once"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gpu-0"))
    assert row[-2:] == ["2", "(80)"]


def test_a_silent_scheduler_is_said(options, server, monkeypatch, capsys) -> None:
    """The rest is shown nevertheless."""
    monkeypatch.setattr("pagebus.web.observatory.scheduler_queries.ANSWER_TIMEOUT_S", 0.05)
    assert main(["top", *options, "--once"]) == 0
    out = capsys.readouterr().out
    assert "The scheduler does not answer." in out
    assert "ingress-0" in out


def test_a_pause_is_said() -> None:
    """Until the work goes on; a server of an earlier version says nothing of it."""
    view, event = View(), {"actors": [], "streams": []}
    for held, said in (({"held": "keep"}, True), ({"held": ""}, False), ({}, False)):
        view.take("actors", event | held)
        console = Console(file=io.StringIO(), width=100)
        console.print(view.draw())
        assert ("An operator has paused the work (keep)." in console.file.getvalue()) == said


def test_no_deployment(capsys) -> None:
    """A frame of nothing is an error."""
    assert main(["top", "--once", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "there is no server" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 200])
def test_figures(width: int) -> None:
    """Times, rates and shares have units; what is not known is a dash; narrow terminals have all of it too."""
    view = View()
    view.take("hello", {"model": "m", "version": "1", "figures": ["ttft_p50_s", "output_tokens_per_s", "kv_usage"]})
    view.take("vitals", {"figures": [0.0123, 12345.6, 0.25]})
    view.take("state", {"replicas": [], "requests": []})
    actor = {"name": "executor-[0]", "state": "loading", "phase": "weights", "rate": None, "unit": "steps/s",
             "cpu": 0.5, "memory_bytes": 2**30, "gpu": None, "gpu_memory_bytes": None, "restarts": 2}  # fmt: skip
    for cpu in (None, actor["cpu"]):  # rates are known from the second look on
        assert not view.is_whole
        view.take("actors", {"actors": [{**actor, "cpu": cpu}], "streams": [{"name": "jobs", "length": 9}]})
    assert view.is_whole
    console = Console(file=io.StringIO(), width=width)
    console.print(view.draw())
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert [each for each in ("12.3 ms", "12346", "25%", "50%", "1.00", "weights") if each not in text] == []
    assert text.count("executor-[0]") == (3 if width == 40 else 1)


def test_a_low_terminal() -> None:
    """Streams that hold something are shown while there is place, and how many more there are."""
    view = View()
    streams = [{"name": f"stream-{number}", "length": int(number in (3, 7))} for number in range(10)]
    view.take("actors", {"actors": [], "streams": streams})
    for height, shown in ((None, 10), (16, 10), (15, 8)):
        console = Console(file=io.StringIO(), width=200)
        console.print(view.draw(height))
        lines = console.file.getvalue().splitlines()
        assert height is None or len(lines) <= height
        found = [line.split()[0] for line in lines if line.startswith("stream-")]
        assert found == ["stream-3", "stream-7", *(f"stream-{n}" for n in (0, 1, 2, 4, 5, 6, 8, 9))][:shown]
        assert [line.strip() for line in lines if "more" in line] == ([] if shown == 10 else ["... 2 more"])


def test_an_address_that_is_none(capsys) -> None:
    """A word is not taken for one."""
    assert main(["top", "--once", "--url", "localhost:8000/v1"]) == 2
    assert capsys.readouterr().err == ("pagebus: --url localhost:8000/v1: an address begins with http:// or https://\n")
