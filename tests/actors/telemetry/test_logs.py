"""What log lines look like, and what cannot get into them."""

from __future__ import annotations

import io
import json
import logging

from pagebus.actors.telemetry import logs


def test_json_lines() -> None:
    """Without a terminal each line is a JSON object with time, level, actor and event."""
    out = io.StringIO()
    logs.configure("info", "auto", stream=out)
    logs.get_logger(actor="tokenizer-0").info("tokenized", request_id="r1", tokens=3)
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"actor": "tokenizer-0", "event": "tokenized", "level": "info", "request_id": "r1", "tokens": 3}


def test_what_json_hardly_holds() -> None:
    """An error whose text has half a character, and an integer beyond 64 bits, are lines too."""
    out = io.StringIO()
    logs.configure("info", "json", stream=out)
    try:
        raise ValueError("half \ud800")
    except ValueError:
        logs.get_logger().exception("failed")
    logs.get_logger().info("counted", tokens=2**70)
    failed, counted = map(json.loads, out.getvalue().splitlines())
    assert failed["exception"].endswith("half \ud800")
    assert (counted["event"], counted["tokens"]) == ("counted", 2**70)


def test_console_lines() -> None:
    """For people: text, with the keys behind the event."""
    out = io.StringIO()
    logs.configure("info", "console", stream=out)
    logs.get_logger(actor="a").warning("slow", s=1.5)
    assert "[warning  ] slow actor=a s=1.5" in out.getvalue()


def test_level() -> None:
    """Lines below the level are not written."""
    out = io.StringIO()
    logs.configure("warning", "json", stream=out)
    logs.get_logger().info("quiet")
    logs.get_logger().error("loud")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["loud"]


def test_values_are_cut_and_kept_on_one_line() -> None:
    """What a client sends cannot fill the log, forge a line or steer the terminal."""
    out = io.StringIO()
    logs.configure("info", "console", stream=out)
    logs.get_logger().info("got", text="a\nforged line\x1b[2J" + "x" * 5000)
    assert len(out.getvalue().splitlines()) == 1
    assert len(out.getvalue()) < 400
    assert "\x1b" not in out.getvalue()


def test_libraries_go_the_same_way() -> None:
    """The standard library's loggers write the same kind of line."""
    out = io.StringIO()
    logs.configure("info", "json", stream=out)
    logging.getLogger("some.library").warning("careful %s", "now")
    assert json.loads(out.getvalue())["event"] == "careful now"


def test_exceptions_are_written_out() -> None:
    """The traceback is part of the line."""
    out = io.StringIO()
    logs.configure("info", "json", stream=out)
    try:
        raise ValueError("cause")
    except ValueError:
        logs.get_logger().exception("failed")
    assert "ValueError: cause" in json.loads(out.getvalue())["exception"]


def test_configuring_twice_does_not_double_lines() -> None:
    """The last configuration counts."""
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", "json", stream=first)
    logs.configure("info", "json", stream=second)
    logging.getLogger("x").warning("once")
    assert (first.getvalue(), len(second.getvalue().splitlines())) == ("", 1)


def test_rate_limit() -> None:
    """A flood of the same message becomes one line per interval, with the count of what was left out."""
    now = [0.0]
    limit = logs.RateLimit(10.0, clock=lambda: now[0])

    def record() -> logging.LogRecord:
        return logging.LogRecord("aiohttp.server", logging.ERROR, "f", 1, "bad request %s", ("x",), None)

    assert limit.filter(record())
    assert [limit.filter(record()) for _ in range(5)] == [False] * 5
    now[0] = 10.0
    late = record()
    assert limit.filter(late)
    assert late.getMessage() == "bad request x (5 more like this were left out)"
