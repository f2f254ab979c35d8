"""The executor's disk tier: files that hold what was written, or are gone; places; orders beside plans."""

from __future__ import annotations

import errno
import os
import queue
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.memory import disk_files, open_disk
from pagebus.actors.executor.memory.disk_files import DiskError, DiskFiles
from pagebus.actors.executor.memory.disk_place import take_place
from pagebus.actors.executor.memory.disk_tier import DiskTier
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.kind import identity_of, weights_of
from pagebus.actors.executor.memory.kv_cache import CacheFormat
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import DISK_FORGET, DISK_TELL, DiskReport, StepPlan
from tests.helpers.engine_driver import ints

BYTES = 1000
NAMES = [f"{number:032x}" for number in (1, 2, 3)] + ["ab" * 17]
US, OTHERS = identity_of("us"), identity_of("others")


def open_files(folder: Path, identity: bytes = US) -> DiskFiles:
    return DiskFiles(take_place(folder, identity), BYTES, identity)


def content(seed: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8).data


def empty() -> memoryview:
    return np.zeros(BYTES, np.uint8).data


def blocks_of(folder: Path) -> Path:
    return folder / "0" / "blocks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def written(folder: Path) -> DiskFiles:
    files = open_files(folder)
    for seed, name in enumerate(NAMES):
        files.write(name, content(seed))
    return files


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_later_life_reads_what_was_written(folder: Path, written: DiskFiles) -> None:
    """Whole blocks, also of names with a page's number, in the order of their last use."""
    for age, name in enumerate(reversed(NAMES)):
        os.utime(blocks_of(folder) / name, (age, age))
    written.close()
    files = open_files(folder)
    assert files.contents(10) == NAMES[::-1]
    for seed, name in enumerate(NAMES):
        block = empty()
        files.read(name, block)
        assert block == content(seed)
    assert files.contents(2) == NAMES[-2:], "the newest"
    assert sorted(os.listdir(blocks_of(folder))) == sorted(NAMES[-2:])
    files.close()


def test_only_the_owner_can_read_them(folder: Path, written: DiskFiles) -> None:
    """Folders have mode 0700, files 0600."""
    modes = {stat.S_IMODE(each.stat().st_mode) for each in folder.rglob("*") if each.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "0", blocks_of(folder))} == {0o700}
    written.close()


def test_every_flipped_byte_is_found(folder: Path, written: DiskFiles) -> None:
    """Wherever it is; the file is gone afterwards."""
    path = blocks_of(folder) / NAMES[0]
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(DiskError):
            written.read(NAMES[0], empty())
        assert not path.exists()
    written.close()


@pytest.mark.parametrize("size", [0, 10, BYTES, BYTES + 30, BYTES + 100])
def test_a_file_of_another_size_is_refused(folder: Path, written: DiskFiles, size: int) -> None:
    """Truncated or extended, when it is read and when a start looks."""
    for name in NAMES[:2]:
        os.truncate(blocks_of(folder) / name, size)
    with pytest.raises(DiskError, match="bytes"):
        written.read(NAMES[0], empty())
    assert NAMES[1] not in written.contents(10)
    assert not (blocks_of(folder) / NAMES[1]).exists()
    written.close()


def test_a_file_under_another_name_is_refused(folder: Path, written: DiskFiles) -> None:
    """Whole, with a right checksum, but another content."""
    os.rename(blocks_of(folder) / NAMES[1], blocks_of(folder) / NAMES[0])
    with pytest.raises(DiskError, match="another block"):
        written.read(NAMES[0], empty())
    with pytest.raises(DiskError):
        written.read(NAMES[1], empty())
    written.close()


def test_links_are_not_followed(folder: Path, written: DiskFiles, tmp_path: Path) -> None:
    """Neither where a block is read, nor where one is written."""
    other = tmp_path / "other"
    other.write_bytes((blocks_of(folder) / NAMES[0]).read_bytes())
    (blocks_of(folder) / NAMES[0]).unlink()
    (blocks_of(folder) / NAMES[0]).symlink_to(other)
    (blocks_of(folder) / f"new-{NAMES[1]}").symlink_to(other)
    with pytest.raises(DiskError):
        written.read(NAMES[0], empty())
    with pytest.raises(DiskError):
        written.write(NAMES[1], content(9))
    assert other.stat().st_size == BYTES + 60
    written.close()


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_leaves_nothing_behind(
    folder: Path, written: DiskFiles, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says so or takes only a part; what was there stays."""

    def full(file: int, parts: Any) -> int:
        if short:
            return os.write(file, b"part")
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(disk_files.os, "writev", full)
    with pytest.raises(DiskError):
        written.write("f" * 32, content(5))
    assert sorted(os.listdir(blocks_of(folder))) == sorted(NAMES)
    written.close()


def test_a_process_killed_while_it_writes_leaves_whole_files(folder: Path) -> None:
    """Everything that the next life finds can be read."""
    code = f"""
import sys
from pathlib import Path
from tests.actors.executor.memory.test_disk_tier import content, open_files
files = open_files(Path({str(folder)!r}))
for number in range(10**6):
    files.write(f"{{number:032x}}", content(number))
    print(number, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})
    assert child.stdout is not None
    for _ in range(20):
        child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    files = open_files(folder)
    found = files.contents(10**6)
    assert len(found) >= 20
    for name in found:
        block = empty()
        files.read(name, block)
        assert block == content(int(name, 16))
    files.close()


# -- places -----------------------------------------------------------------------------------------------------------


def test_two_executors_have_two_places(folder: Path, written: DiskFiles) -> None:
    """One that begins while another lives takes the next place; later lives take them again, in any order."""
    second = open_files(folder)
    second.write(NAMES[0], content(7))
    written.close()
    first = open_files(folder)
    assert len(first.contents(10)) == 4
    second.close()
    assert open_files(folder).contents(10) == NAMES[:1]
    assert sorted(os.listdir(folder)) == ["0", "1"]
    first.close()


def test_blocks_of_another_model_are_never_used(folder: Path, written: DiskFiles) -> None:
    """Its place is taken and emptied; a place of one's own kind comes first."""
    others = open_files(folder, OTHERS)
    others.write(NAMES[0], content(8))
    others.close()
    written.close()
    assert open_files(folder, OTHERS).contents(10) == NAMES[:1], "the second place"
    assert open_files(folder, identity_of("a third")).contents(10) == []
    assert sorted(os.listdir(folder)) == ["0", "1"]


@pytest.mark.parametrize("kind", [None, US])
def test_a_place_that_cannot_be_opened_is_free_again(folder: Path, kind: bytes | None) -> None:
    """Whatever is wrong with it, in the folder or with the file that says whose blocks it has."""
    files = open_files(folder, OTHERS)
    files.close()
    wrong = folder / "0" / "kind" if kind is None else blocks_of(folder) / "folder"
    if kind is None:
        wrong.unlink()
    wrong.mkdir()
    with pytest.raises(OSError, match=wrong.name):
        take_place(folder, US)
    wrong.rmdir()
    assert take_place(folder, US).blocks == blocks_of(folder)


def test_without_a_disk_tier_its_place_is_free_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an executor that serves on without one."""
    told: list[DiskReport] = []

    def broken(self: DiskFiles, most: int) -> list[str]:
        raise OSError("it is broken")

    def begin() -> DiskTier | None:
        memory, cached = HostMemory(8, BYTES, torch.device("cpu")), cast(CacheFormat, None)
        settings = Settings(disk_cache_dir=str(folder), disk_cache_gib=1.0)
        return open_disk.open_disk(settings, folder, None, cached, memory, told.append)

    monkeypatch.setattr(open_disk, "kind_of_blocks", lambda *_: US)
    with monkeypatch.context() as patched:
        patched.setattr(DiskFiles, "contents", broken)
        assert begin() is None
    assert [report.error for report in told] == ["no disk tier: it is broken"]
    tier = begin()
    assert tier is not None
    tier.close()
    assert os.listdir(folder) == ["0"]
    place = take_place(folder, US)
    place.blocks.rmdir()
    with pytest.raises(FileNotFoundError):
        DiskFiles(place, BYTES, US)
    assert take_place(folder, US).blocks == blocks_of(folder)


def test_a_folder_that_is_not_ones_own_is_refused(tmp_path: Path) -> None:
    """A link, a file, or a folder that others can enter."""
    real = tmp_path / "real"
    real.mkdir(mode=0o755)
    with pytest.raises(SettingsError, match="chmod 700"):
        take_place(real, US)
    real.chmod(0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(SettingsError, match="symbolic link"):
        take_place(tmp_path / "link", US)
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(SettingsError, match="no folder"):
        take_place(tmp_path / "file", US)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns it could read or replace what is in it."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SettingsError, match="another user"):
        take_place(tmp_path / "cache", US)


def test_weights_are_told_apart(tmp_path: Path) -> None:
    """By names, sizes and times; in a cache of the hub by content alone."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "a").write_bytes(b"1")
    first = weights_of(model)
    os.utime(model / "a", (1, 1))
    assert weights_of(model) != first
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_bytes(b"1")
    (model / "a").unlink()
    (model / "a").symlink_to(blobs / "abc")
    second = weights_of(model)
    os.utime(blobs / "abc", (1, 1))
    assert weights_of(model) == second == [("a", 1, "abc")]


# -- orders -----------------------------------------------------------------------------------------------------------


class Tier:
    """A tier over real files, and its reports."""

    def __init__(self, folder: Path, num_blocks: int = 10) -> None:
        self.memory = HostMemory(8, BYTES, torch.device("cpu"))
        self.reports: queue.Queue[DiskReport] = queue.Queue()
        self.tier = DiskTier(open_files(folder), self.memory, num_blocks, self.reports.put)

    def plan(
        self, *, epoch: int = 1, reads: dict[str, int] | None = None, writes: dict[str, int] | None = None,
        mark: Callable[[], Any] = lambda: None, **more: Any,
    ) -> None:  # fmt: skip
        reads, writes = reads or {}, writes or {}
        plan = StepPlan(
            step=1, planned_s=0.0, num_decodes=0, disk_reads=tuple(reads), disk_read_hosts=ints([*reads.values()]),
            disk_writes=tuple(writes), disk_write_hosts=ints([*writes.values()]), **more,
        )  # fmt: skip
        self.tier.apply(plan, epoch, mark)

    def report(self) -> DiskReport:
        return self.reports.get(timeout=60)


def test_blocks_go_to_the_disk_and_come_back(folder: Path) -> None:
    """A report for each plan and way, with what has failed and how fast it was; then contents for a new scheduler."""
    one = Tier(folder)
    one.memory.block(3)[:] = content(1)
    one.plan(writes={NAMES[0]: 3})
    assert one.report().written == (NAMES[0],)
    one.plan(reads={NAMES[0]: 5, NAMES[1]: 6})
    told = one.report()
    assert "reading failed" in told.error
    told = one.report()
    assert (told.read, told.not_read) == ((NAMES[0],), (NAMES[1],))
    assert told.bytes_per_s > 0
    assert one.memory.block(5).data == content(1)
    one.tier.close()

    other = Tier(folder)
    other.plan(epoch=4, disk_order=DISK_TELL)
    told = other.report()
    assert (told.found, told.scheduler_epoch) == ((NAMES[0],), 4)
    other.plan(epoch=4, disk_order=DISK_FORGET)
    other.tier.close()
    assert os.listdir(blocks_of(folder)) == []


def test_orders_wait_for_the_copies_before_them(folder: Path) -> None:
    """A thread touches a host block only behind the plan's event."""

    class Copies:
        def synchronize(self) -> None:
            time.sleep(0.05)
            one.memory.block(2)[:] = content(6)

    one = Tier(folder)
    one.plan(writes={NAMES[0]: 2}, mark=Copies)
    one.report()
    one.plan(reads={NAMES[0]: 4})
    one.report()
    assert one.memory.block(4).data == content(6)
    one.tier.close()


def test_orders_of_an_earlier_scheduler_are_over_when_another_begins(folder: Path) -> None:
    """Nothing writes into host blocks afterwards: what had not begun is left out, and nobody hears of it."""

    class Slow:
        def synchronize(self) -> None:
            time.sleep(0.02)

    one = Tier(folder)
    one.plan(writes=dict.fromkeys(NAMES, 1))
    one.report()
    one.plan(reads=dict.fromkeys(NAMES * 1, 0), mark=Slow)
    one.plan(epoch=2)
    one.memory.block(0)[:] = 0
    one.tier.close()
    assert not one.memory.block(0).any()


def test_hosts_that_do_not_exist_are_refused(folder: Path) -> None:
    """As those of other copies are."""
    one = Tier(folder)
    with pytest.raises(PlanError, match="disk_read_hosts holds 8"):
        one.plan(reads={NAMES[0]: 8})
    plan = StepPlan(step=1, planned_s=0.0, num_decodes=0, disk_drops=("ab",), disk_write_hosts=ints([1]))
    with pytest.raises(PlanError, match="for 0 names"):
        one.tier.apply(plan, 1, lambda: None)
    one.tier.close()
