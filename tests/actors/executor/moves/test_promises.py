"""Pulls that are promised before their last blocks are there, with a device that copies when somebody waits for it."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.device.promises import Early, Promises
from pagebus.actors.executor.moves.carriers import device_blocks, device_memory
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.runs import num_last
from pagebus.actors.executor.moves.group import Group
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.moves.source import Source
from pagebus.actors.executor.step.completion import Completion, Launched
from pagebus.bus.messages import BlockPull, PullReport, StepPlan
from tests.actors.executor.moves.caches import LocalCache
from tests.actors.executor.moves.test_locked_file import FakeDevice
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S

SOURCES, TARGETS = [*range(0, 20, 2), 21, 22, 23], list(range(1, 14))
"""Eleven runs, of which the last has three blocks."""


class LazyDevice(FakeDevice):
    """It copies what is in front of an event when somebody waits for that."""

    def __init__(self, cache: LocalCache, lender: LocalCache) -> None:
        super().__init__(cache)
        self.queued: list[tuple[int, int, int]] = []
        base = int(lender.bytes.ctypes.data)
        self.driver = cast("Any", SimpleNamespace(copy=self.queue, open=lambda handle: base, close=lambda base: None))

    def queue(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        self.queued += zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)

    def mark(self, stream: object) -> Any:
        return SimpleNamespace(synchronize=partial(self.copy_first, len(self.queued)))

    def copy_first(self, count: int) -> None:
        for target, source, size in self.queued[:count]:
            ctypes.memmove(target, source, size)


@pytest.fixture
def lender() -> LocalCache:
    return LocalCache(filled=True)


@pytest.fixture
def device(lender: LocalCache, monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    made = LazyDevice(LocalCache(), lender)
    monkeypatch.setattr(device_blocks, "_mark", made.mark)
    monkeypatch.setattr(device_blocks, "COPIES_PER_EVENT", 4)
    monkeypatch.setattr(device_memory, "os", SimpleNamespace(getpid=lambda: -1, close=device_memory.os.close))
    return made


def on_device(lender: LocalCache) -> Address:
    return replace(lender.address, device="gpu", handle="00" * device_memory.HANDLE_BYTES, offset=0)


@pytest.mark.parametrize(("num_blocks", "most", "last"), [(0, 9, 0), (2, 9, 0), (3, 9, 1), (5, 9, 3), (99, 4, 4)])
def test_the_last_runs_have_no_more_than_so_many_blocks(num_blocks: int, most: int, last: int) -> None:
    runs = [(source, target, 1) for source, target in zip(SOURCES[:10], TARGETS[:10], strict=True)] + [(21, 11, 3)]
    assert num_last(runs, num_blocks, most) == last


def test_it_is_told_when_only_the_last_blocks_are_under_way(device: LazyDevice, lender: LocalCache) -> None:
    """All others are there then; behind the event, these are."""
    told: list[Any] = []

    def tell(event: Any) -> None:
        told.append(event)
        assert device.cache.holds(SOURCES[:8], TARGETS[:8])
        assert not device.cache.holds(SOURCES[8:9], TARGETS[8:9])
        event.synchronize()
        assert device.cache.holds(SOURCES, TARGETS)

    source = Source(on_device(lender), device, network=False)
    source.copy(ints(SOURCES), ints(TARGETS), lambda: False, early=Early(5, tell))
    assert len(told) == 1
    source.copy(ints(SOURCES), ints(TARGETS), lambda: False, early=Early(2, tell))
    assert len(told) == 1
    source.close()


@pytest.mark.parametrize("late", [False, True])
def test_no_other_way_is_tried_once_it_is_told(device: LazyDevice, lender: LocalCache, late: bool) -> None:
    """The lender's cache is not what it was: before that is told, blocks may come otherwise; later nothing will do."""
    source, copied = Source(on_device(lender), device, network=False), list[int]()
    other = SimpleNamespace(copy=lambda sources, *_: copied.append(len(sources)), close=lambda: None)
    source._carriers[False].append(cast("Any", other))

    def end(_: object = None) -> bool:
        lender.shared.map[:16] = bytes(16)
        return False

    early = Early(5, end) if late else Early(5, lambda event: None)
    if late:
        with pytest.raises(MoveError, match="does not have this cache"):
            source.copy(ints(SOURCES), ints(TARGETS), lambda: False, early=early)
    else:
        source.copy(ints(SOURCES), ints(TARGETS), end, early=early)
    assert (copied, early.is_told) == ([] if late else [len(SOURCES)], late)
    source.close()


class Waiting:
    """A source of which the second pull, and later ones, can be promised. ``gate``: opens when a copy may end."""

    is_gone = False

    def __init__(self) -> None:
        self.gate: queue.Queue[str] = queue.Queue()
        self.earlies: list[Early | None] = []

    def prepare(self, sources: object, *, hosts: bool) -> None:
        """Nothing takes long."""

    def copy(self, sources: Any, targets: Any, stop: object, *, hosts: bool, early: Early | None) -> None:
        if len(sources) == 1:
            return
        self.earlies.append(early)
        if early is not None:
            early.tell(cast("Any", "event"))
        if error := self.gate.get(timeout=LIMIT_S):
            raise MoveError(error)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


class Device:
    """The stream that waits."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    return made


Told = queue.Queue[PullReport]


@pytest.fixture
def told() -> Told:
    return queue.Queue()


@pytest.fixture
def order(waiting: Waiting, told: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Moves]]:
    """Have an executor pull two blocks under this number."""
    cache, made = LocalCache(), list[Moves]()

    def begin(number: int, *, ranks: int = 1, epoch: int = 1) -> Moves:
        if not made:
            group = Group(0, (cache.address,) * ranks, "kind")
            made.append(Moves(cache.own, cache.blocks, group, told.put, network=False))
            monkeypatch.setattr(made[0], "_source", lambda address: waiting)
        pulls = (BlockPull(pull=number, address="other", num_blocks=2),)
        plan = StepPlan(step=1, planned_s=0.0, num_decodes=0, pulls=pulls, pull_sources=ints([1, 2]),
                        pull_blocks=ints([3, 4]))  # fmt: skip
        made[0].apply(plan, epoch, lambda: None)
        return made[0]

    yield begin
    for moves in made:
        moves.close()
    cache.own.close()


def said(told: Told) -> tuple[int, bool, bool]:
    report = told.get(timeout=LIMIT_S)
    return report.pull, report.there, report.promised


def test_a_pull_is_promised_once_it_is_known_how_fast_they_are(
    order: Callable[..., Moves], waiting: Waiting, told: Told, stream: Device
) -> None:
    """Two reports of it. Until the second, what the device does waits for it, and is proved then."""
    waiting.gate.put("")
    moves = order(1)
    assert said(told) == (1, True, False)
    assert moves.promises.follow() == ()
    order(2)
    assert said(told) == (2, True, True)
    (promise,) = moves.promises.follow()
    assert stream.waited == ["event"]
    waiting.gate.put("")
    promise.prove()
    assert said(told) == (2, True, False)
    assert moves.promises.follow() == ()
    assert [early is None for early in waiting.earlies] == [True, False]


def test_no_step_follows_a_promise_that_was_not_kept(
    order: Callable[..., Moves], waiting: Waiting, told: Told, stream: Device
) -> None:
    """Neither one that has begun before that was known, nor a later one; but another scheduler knows nothing of it."""
    waiting.gate.put("")
    moves = order(1)
    order(2)
    assert [said(told) for _ in range(2)] == [(1, True, False), (2, True, True)]
    before = moves.promises.follow()
    waiting.gate.put("the lender is gone")
    assert said(told) == (2, False, False)
    for promise in (*before, *moves.promises.follow()):
        with pytest.raises(EngineError, match="promised are not there: the lender is gone"):
            promise.prove()
    waiting.gate.put("")
    order(3, epoch=2)
    assert moves.promises.follow() == ()
    assert said(told) == (3, True, False)
    assert waiting.earlies[-1] is None  # how fast they are is known anew


def test_of_many_pulls_the_last_is_promised(
    order: Callable[..., Moves], waiting: Waiting, told: Told, stream: Device
) -> None:
    """The others have ended when the last one begins."""
    for number in range(1, 5):
        order(number)
    for _ in range(4):
        waiting.gate.put("")
    reports = [said(told) for _ in range(5)]
    assert reports == [(1, True, False), (2, True, False), (3, True, False), (4, True, True), (4, True, False)]


def test_ranks_promise_nothing(order: Callable[..., Moves], waiting: Waiting, told: Told) -> None:
    """None knows when the others' parts are there."""
    for number in (1, 2):
        waiting.gate.put("")
        order(number, ranks=2)
        assert said(told) == (number, True, False)
    assert waiting.earlies == [None, None]


def test_a_promise_that_nobody_keeps_is_not_waited_for_for_ever(
    stream: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may never return."""
    monkeypatch.setattr("pagebus.actors.executor.device.promises.PATIENCE_S", 0.0)
    promises = Promises()
    promises.give(1, cast("Any", "event"))
    with pytest.raises(EngineError, match="not there after"):
        promises.follow()[0].prove()


@pytest.mark.parametrize("error", ["", "gone"])
def test_a_result_is_given_once_its_promises_are_proved(
    error: str, stream: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or never."""
    promises, finished = Promises(), list[object]()
    promises.give(1, cast("Any", "event"))
    completion: Any = Completion.__new__(Completion)
    readback = SimpleNamespace(wait=lambda check: ("tokens", 0.0), scores=None, agreed=None)
    launched = Launched(cast("Any", SimpleNamespace(plan=SimpleNamespace(step=1))), cast("Any", SimpleNamespace(
        constrained=(), logprob_rows=None)), 0.0, cast("Any", readback), None, None, promises.follow())  # fmt: skip
    completion._launched, completion._samples, completion._spans = queue.SimpleQueue(), True, None
    monkeypatch.setattr(completion, "finish", lambda *_: finished.append(1), raising=False)
    for each in (launched, None):
        completion.put(each)
    promises.end(1, error)
    pool: Any = SimpleNamespace(give_back=lambda readback: None)
    if error:
        with pytest.raises(EngineError, match="gone"):
            completion.run(pool, cast("Any", None), lambda: None)
    else:
        completion.run(pool, cast("Any", None), lambda: None)
    assert len(finished) == (not error)
