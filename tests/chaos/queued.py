"""Jobs pushed by any Redis client, and what came of them: all answered, each as interactive clients are."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from tests.chaos.deployment import Deployment
from tests.chaos.load import Answer, Load, difference

JOBS, RESULTS = "{pagebus}:jobs", "{pagebus}:results"
CHUNK = 1000


class Queued:
    """``count`` jobs, which are those of ``load`` again and again; ``answers``: how often each was answered."""

    def __init__(self, deployment: Deployment, load: Load, count: int) -> None:
        self.deployment, self.load, self.count = deployment, load, count
        self.answers: Counter[str] = Counter()
        self.problems: list[str] = []
        self._position = "0"

    def push(self) -> float:
        """All of them, pipelined; returns the seconds it took."""
        began_s = time.monotonic()
        for first in range(0, self.count, CHUNK):
            pipeline = self.deployment.redis.pipeline(transaction=False)
            for index in range(first, min(first + CHUNK, self.count)):
                job = self.load.jobs[index % len(self.load.jobs)]
                request = {"custom_id": f"{index}", "method": "POST", "url": job.path, "body": job.body}
                pipeline.xadd(JOBS, {"request": json.dumps(request)})
            pipeline.execute()
        return time.monotonic() - began_s

    async def collect(self, limit_s: float) -> None:
        """Wait until every job is answered, and compare each answer with that of an interactive client."""
        deadline_s = time.monotonic() + limit_s
        while len(self.answers) < self.count and time.monotonic() < deadline_s:
            await asyncio.to_thread(self.take)
            await asyncio.sleep(0.05)
        missing = self.count - len(self.answers)
        assert not missing, f"{missing} jobs were not answered, such as {self._some_missing()}"
        assert not self.problems, f"{len(self.problems)} wrong answers, such as {self.problems[:2]}"
        self.deployment.redis.delete(RESULTS)

    def take(self) -> None:
        """What has come since the last call; Redis need not be there."""
        found = self.deployment.redis.xrange(RESULTS, f"({self._position}", count=CHUNK)
        for entry_id, fields in found:
            self._position = entry_id.decode()
            self._check(json.loads(fields[b"result"]))
        if found:
            self.deployment.redis.xtrim(RESULTS, minid=f"{self._position}")

    def _check(self, line: dict[str, Any]) -> None:
        self.answers[line["custom_id"]] += 1
        place = int(line["custom_id"]) % len(self.load.jobs)
        response = line["response"]
        if response is None or response["status_code"] != 200:
            self.problems.append(f"{line}"[:500])
            return
        answer = Answer()
        answer.add_all(response["body"])
        if answer.told() != self.load.expected[place]:
            self.problems.append(difference(self.load.expected[place], answer.told()))

    def _some_missing(self) -> list[int]:
        return [index for index in range(self.count) if f"{index}" not in self.answers][:5]
