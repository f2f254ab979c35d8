"""Files onto the stream of jobs, and results into files: interrupted anywhere, every line goes once and comes once."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from pathlib import Path

import orjson
import pytest

from pagebus.actors.commands.jobs import transfer
from pagebus.actors.commands.jobs.transfer import ResultsMissing, batch_of, collect, lines_of, submit
from pagebus.bus.contract import START
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import Job, JobResult
from pagebus.bus.streams import Names

NAMES = Names()


def silent(phase: str, share: float | None, detail: str) -> None:
    """Nobody looks."""


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(MemoryServer(), NAMES)


def write(path: Path, count: int) -> Path:
    path.write_text("\n\n".join(f'{{"custom_id": "{i}"}}' for i in range(count)))
    return path


async def jobs(bus: MemoryBus) -> list[Job]:
    entries = await bus.read({NAMES.jobs: START}, count=10**6, block_ms=0)
    return [entry.message for entry in entries if isinstance(entry.message, Job)]


async def answer(bus: MemoryBus, batch: str, first: int, last: int) -> None:
    """Results of some lines, as the jobs actor writes them."""
    results = [orjson.dumps({"id": f"batch_req_{i}", "custom_id": f"{i}"}).decode() for i in range(first, last)]
    await bus.publish([(NAMES.batch_results(batch), JobResult(result=result, batch=batch)) for result in results])


async def test_every_line_is_submitted_once(bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the command is interrupted and given again, and when there is nothing left to submit."""
    monkeypatch.setattr(transfer, "CHUNK_LINES", 3)
    file = write(tmp_path / "in.jsonl", 10)
    shown: list[float | None] = []

    def interrupt(phase: str, share: float | None, detail: str) -> None:
        shown.append(share)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await submit(bus, NAMES, file, "b", interrupt)
    assert len(await jobs(bus)) == 6
    assert await submit(bus, NAMES, file, "b", silent, priority=2) == 10
    assert await submit(bus, NAMES, file, "b", silent) == 10
    assert [orjson.loads(job.request)["custom_id"] for job in await jobs(bus)] == [str(i) for i in range(10)]
    assert (await jobs(bus))[-1] == Job(
        request='{"custom_id": "9"}', reply_to=NAMES.batch_results("b"), batch="b", priority="2"
    )
    assert await bus.counters(NAMES.batch("b")) == [{"submitted": 10, "total": 10}]


def test_a_line_that_is_no_utf_8_is_no_json(tmp_path: Path) -> None:
    """So that it is refused, in place of being computed with other characters."""
    file = tmp_path / "in.jsonl"
    file.write_bytes('{"content": "café"}\n'.encode("latin-1") + '{"content": "café"}'.encode())
    first, second = (line.text for line in lines_of(file))
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(first)
    assert orjson.loads(second) == {"content": "café"}


async def test_the_stream_does_not_grow_beyond_a_bound(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond it waits in the file until there is room."""
    monkeypatch.setattr(transfer, "CHUNK_LINES", 2)
    monkeypatch.setattr(transfer, "MAX_QUEUED", 3)
    monkeypatch.setattr(transfer, "POLL_S", 0.001)
    submitting = asyncio.create_task(submit(bus, NAMES, write(tmp_path / "in.jsonl", 9), "b", silent))
    most = 0
    while not submitting.done():
        await asyncio.sleep(0.002)
        length = await bus.length(NAMES.jobs)
        most = max(most, length)
        if length > 3:
            entries = await bus.read({NAMES.jobs: START}, block_ms=0)
            await bus.trim(NAMES.jobs, entries[-1].id)
    assert await submitting == 9
    assert most <= 3 + 2


async def test_results_are_collected_once(bus: MemoryBus, tmp_path: Path) -> None:
    """What came twice, was collected before, or was torn off in the middle of a line, is in the file once in the end;
    the stream is empty then."""
    out = tmp_path / "out.jsonl"
    await bus.count({NAMES.batch("b"): {"submitted": 6, "total": 6}}, ttl_s=60)
    await answer(bus, "b", 0, 3)
    await collect(bus, NAMES, "b", out, silent, wait=False)
    out.write_bytes(out.read_bytes()[:-4])
    await answer(bus, "b", 1, 6)
    await answer(bus, "b", 2, 4)
    counters = await collect(bus, NAMES, "b", out, silent, wait=True)
    assert counters["total"] == 6
    assert sorted(orjson.loads(line)["custom_id"] for line in out.read_text().splitlines()) == list("012345")
    assert await bus.length(NAMES.batch_results("b")) == 0


async def test_results_that_were_collected_into_another_file(bus: MemoryBus, tmp_path: Path) -> None:
    """They never come again: this is said, in place of a wait without end. Nothing of the stream is left."""
    await bus.count({NAMES.batch("b"): {"submitted": 3, "total": 3}}, ttl_s=60)
    await answer(bus, "b", 0, 2)
    await collect(bus, NAMES, "b", tmp_path / "first.jsonl", silent, wait=False)
    await answer(bus, "b", 2, 3)
    await bus.count({NAMES.batch("b"): {"completed": 1, "failed": 1, "cancelled": 1}}, ttl_s=60)
    with pytest.raises(ResultsMissing, match=r"second.jsonl has 1 of 3 results.*--batch"):
        await collect(bus, NAMES, "b", tmp_path / "second.jsonl", silent, wait=True)
    assert await bus.last_id(NAMES.batch_results("b")) == START


def test_a_batch_is_found_by_its_file(tmp_path: Path) -> None:
    """The same file has the same batch, another path or other content another one; the name is a valid one."""
    first = batch_of(write(tmp_path / "a b.jsonl", 3))
    assert first == batch_of(tmp_path / "a b.jsonl")
    assert first.startswith("a-b-")
    assert first != batch_of(write(tmp_path / "c.jsonl", 3))
    assert first != batch_of(write(tmp_path / "a b.jsonl", 4))


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    """Blank lines do not count, broken characters are kept for the answer to name them, shares are of the file."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"one\n\n \n\xff\nthree")
    assert list(lines_of(file)) == [(1, "one", 4 / 14), (4, "\\xff", 9 / 14), (5, "three", 1.0)]
    assert [line.text for line in lines_of(file, 2)] == ["three"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    """Elsewhere it is, and a line with nothing else is blank."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(BOM_UTF8 + b"one\n" + BOM_UTF8 + b"two")
    assert [line.text for line in lines_of(file)] == ["one", "\ufefftwo"]
    file.write_bytes(BOM_UTF8 + b"\none")
    assert [(line.number, line.text) for line in lines_of(file)] == [(2, "one")]
