"""Names of adapters change at random under load, while the actors that know adapters are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.lora.changes import change_at_random


@pytest.mark.slow
async def test_every_answer_is_of_a_version_that_its_name_had(tmp_path: Path) -> None:
    """Nothing is left of any; ``python -m tests.system.lora.changes`` does the same 10,000 times."""
    done = await change_at_random(tmp_path, 60, ["executor", "scheduler", "ingress"])
    assert done.problems == []
    assert done.changes == 60
    assert sum(done.kills.values()) == 3
    assert done.answers["an adapter's"] > 0
    assert done.answers["no such name"] > 0
