"""One batch, without the actor around it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

from pagebus.web.jobs.batches import BatchRun, Progress
from pagebus.web.jobs.window import Window
from tests.web.batch_world import ask


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
