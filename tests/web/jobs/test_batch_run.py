"""One batch, without the actor around it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

from pagebus.web.http.limits import BYTES_PER_BRACKET
from pagebus.web.jobs.batches import BatchRun, Progress, check_file
from pagebus.web.jobs.window import Window
from tests.web.batch_world import URL, ask


async def test_others_have_their_turn_between_lines_that_are_done(tmp_path: Path) -> None:
    """A batch that is taken up again may have thousands of them."""
    path, done, unused = tmp_path / "in.jsonl", {f"{i}" for i in range(100)}, cast(Any, None)
    path.write_text("\n".join(json.dumps(ask(custom_id)) for custom_id in done))
    run = BatchRun(unused, {"owner": ""}, unused, Window(1), len(done), unused, unused, unused)
    work, turns = asyncio.create_task(run._work(path, Progress(unused, unused, done))), 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > len(done)


def test_lines_with_too_many_brackets_are_not_parsed(tmp_path: Path) -> None:
    """As over HTTP: they are short, and take a hundred times as much memory."""
    path = tmp_path / "in.jsonl"
    path.write_text("[" * 65)
    errors, count = check_file(path, URL, 1, 64 * BYTES_PER_BRACKET)
    assert ([(each["code"], each["line"]) for each in errors], count) == ([("line_too_long", 1)], 1)
    assert "64 arrays" in errors[0]["message"]
