"""The command line of dead letters (what it does to a running deployment is tested in
tests/system/faults/test_poison.py)."""

from __future__ import annotations

import asyncio
import functools
import json

import numpy as np
import pytest

from pagebus.actors.commands.cli import main
from pagebus.bus import connect
from pagebus.bus.contract import Entry, EntryId
from pagebus.bus.messages import AbortRequest, GenerateRequest, SamplingParams
from pagebus.bus.redis.bus import RedisBus


@pytest.fixture
def command(redis_url, redis_names, capsys):
    """Runs the command over three dead letters; returns its status, standard output and standard error."""
    ids = np.arange(100, dtype=np.int32)
    request = GenerateRequest(
        request_id="r1", ingress="in", sampling=SamplingParams(), prompt="a\x1b[31m\nb", prompt_token_ids=ids
    )

    abort = AbortRequest(request_id="r2")

    async def fill() -> None:
        bus = RedisBus(redis_url, redis_names)
        await bus.connect()
        await bus.dead_letter("tokenizer", Entry(redis_names.requests, EntryId(5, 1), request, 3), "it broke")
        await bus.dead_letter(
            "tokenizer", Entry(redis_names.requests, EntryId(6, 0), None, 1, "no frame", {b"x": b"y"}), ""
        )
        await bus.dead_letter("scheduler", Entry(redis_names.control, EntryId(7, 0), abort), "odd\nline")
        await bus.close()

    asyncio.run(fill())

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["dead-letters", *arguments, "--bus", redis_url, "--name", redis_names.deployment])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_list(command):
    """One line each, by stage; as JSON with the same facts."""
    status, out, _ = command("list")
    rows = json.loads(command("list", "--json")[1])

    assert status == 0
    assert [row["letter"].partition("/")[0] for row in rows] == ["tokenizer", "tokenizer", "scheduler"]
    assert [row["reason"] for row in rows] == ["it broke", "no frame", "odd\nline"]
    assert [row["message"] for row in rows] == ["GenerateRequest", None, "AbortRequest"]
    assert [row["request"] for row in rows] == ["r1", None, "r2"]
    assert all(row["letter"] in out for row in rows)
    assert [line.split()[0] for line in out.splitlines()] == ["letter", *(row["letter"] for row in rows)]
    assert out.splitlines()[1].rstrip().endswith("GenerateRequest  r1       3           it broke")


def test_show(command):
    """The message's fields; arrays are cut, and nothing a client wrote can steer the terminal."""
    status, out, _ = command("show", "tokenizer")
    (row, _) = json.loads(command("show", "tokenizer", "--json")[1])

    assert status == 0
    assert "\x1b" not in out
    assert row["fields"]["prompt_token_ids"] == [*range(16), "... 100"]
    assert row["deliveries"] == 3


def test_what_cannot_be_done(command):
    """Unknown letters and those that nobody can process are told, with status 1; nothing named is a usage error."""
    rows = json.loads(command("list", "--json")[1])

    assert command("show", "tokenizer/1-1")[:2] == (1, "none\n")
    assert command("requeue")[0] == 2
    status, _, error = command("requeue", rows[1]["letter"])
    assert status == 1
    assert "cannot be decoded" in error


def test_requeue_and_drop(command, redis_url, redis_names):
    """What is sent again is where it came from; what is dropped is gone."""
    rows = json.loads(command("list", "--json")[1])

    assert command("requeue", rows[0]["letter"])[0] == 0
    assert command("drop", "--all")[0] == 0
    assert command("list")[1] == "none\n"

    async def waiting() -> int:
        bus = RedisBus(redis_url, redis_names)
        count = await bus.length(redis_names.requests)
        await bus.close()
        return count

    assert asyncio.run(waiting()) == 1


def test_no_bus():
    """Without a bus the command says so."""
    assert main(["dead-letters", "list"]) == 2


def test_a_redis_that_is_down(capsys, monkeypatch, unused_tcp_port):
    """Another try may help, so it is no wrong setting."""
    monkeypatch.setattr(connect, "open_bus", functools.partial(connect.open_bus, connect_timeout_s=0.1))
    status = main(["dead-letters", "list", "--bus", f"redis://127.0.0.1:{unused_tcp_port}"])
    assert status == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("pagebus: no connection to Redis at ")
