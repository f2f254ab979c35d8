"""Random schedules: whatever happens in whatever order, every request ends once, with exactly its tokens, tenants
(salts) with equal prompts never have a block in common, and false results change nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from pagebus.actors.scheduler.core import planner
from pagebus.actors.scheduler.core.lending import Lending, Located, Place, narrowed
from pagebus.actors.scheduler.events import CachesReset, ReplicaSuspended
from pagebus.actors.scheduler.kv import block_pool, prefix_index
from pagebus.actors.scheduler.moves import link, pulls
from pagebus.actors.scheduler.replica.prefix_match import Offer
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import MOST_LOSSES
from pagebus.bus.messages import AbortRequest, TokenizedRequest
from tests.actors.scheduler.fake_disk import FakeDisk
from tests.actors.scheduler.moves.fake_pulls import FakePulls, Lenders
from tests.actors.scheduler.moves.splits import change_often, split_often
from tests.actors.scheduler.rests import rest_often
from tests.actors.scheduler.world import World, fits, request
from tests.grids import examples

MAX_MODEL_LEN = 96
in_one = Lending._in_one
RARELY = st.sampled_from([False, False, False, True])
FAMILIES = [[(a * i * i + b * i + 3) % 40 for i in range(80)] for a, b in ((1, 5), (3, 7), (2, 11))]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often share a prefix: the head of a family, and sometimes a tail of their own."""
    family = draw(st.sampled_from(FAMILIES))
    head = family[: draw(st.integers(1, 40))]
    return head + draw(st.lists(st.integers(0, 39), max_size=6))


class Schedules(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 26),
        budget=st.sampled_from([16, 64]),
        max_num_seqs=st.integers(1, 8),
        depth=st.sampled_from([1, 2, 2, 3, 4]),
        caching=st.sampled_from([True, True, False]),
        eos=st.sampled_from([(), (0,), (0, 5, 9, 17)]),
        aging_s=st.sampled_from([0.0001, 0.002, 30.0]),
        num_host_blocks=st.sampled_from([0, 3, 8, 20, 60]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        window=st.sampled_from([0, 0, 1, 3, 6, 13, 24]),
        windowed=st.sampled_from([(0, 0), (0, 0), (1, 1), (2, 6), (3, 13), (1, 24)]),
        copies=st.tuples(st.integers(0, 3), st.sampled_from([0.1, 1.0, 3.0])),
        num_drafts=st.sampled_from([0, 0, 1, 3, 7]),
        disk=st.tuples(st.sampled_from([0, 0, 3, 12, 60]), st.sampled_from([0, 0, 1, 2, 5])),
        stages=st.sampled_from([1, 1, 2, 3]),
        num_prefill=st.sampled_from([0, 0, 1, 2, None]),
        pulls=st.tuples(st.sampled_from(["", "kind"]), st.sampled_from([0, 0, 1, 2, 5]), st.sampled_from([10.0, 1e6])),
        host=st.sampled_from(["", "here", "here"]),
        step_s=st.sampled_from([0.0, 0.02]),
        ranks=st.sampled_from([1, 1, 2, 3]),
        promises=st.sampled_from([0, 1, 2]),
        doubts=st.sampled_from([0, 1, 3]),
    )
    def begin(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        depth: int,
        caching: bool,
        eos: tuple[int, ...],
        aging_s: float,
        num_host_blocks: int,
        mode: str,
        window: int,
        windowed: tuple[int, int],
        copies: tuple[int, float],
        num_drafts: int,
        disk: tuple[int, int],
        stages: int,
        num_prefill: int | None,
        pulls: tuple[str, int, float],
        host: str,
        step_s: float,
        ranks: int,
        promises: int,
        doubts: int,
    ) -> None:
        window = 0 if windowed[0] else window
        self.world = World(
            pipeline_depth=depth,
            enable_prefix_caching=caching,
            eos_token_ids=eos,
            priority_aging_s=aging_s,
            preemption_mode=mode,
            window=window,
            num_prefill=num_prefill or 0,
            auto_roles=num_prefill is None,
        )
        self.world.doubts = doubts
        self.options = {
            "num_blocks": num_blocks * (1 + windowed[0]),
            "budget": budget,
            "max_num_seqs": max_num_seqs,
            "max_model_len": MAX_MODEL_LEN,
            "num_host_blocks": num_host_blocks,
            "copy_lag": copies[0],
            "copy_tokens": copies[1],
            "window": window,
            "windowed_pages": windowed[0],
            "windowed_tokens": windowed[1],
            "step_s": step_s,
        }
        self.disks = defaultdict(lambda: FakeDisk(*disk))
        self.lenders: Lenders = {}
        self.pulls = lambda: FakePulls(*pulls, lenders=self.lenders, host=host, ranks=ranks, promises=promises)
        if num_drafts:
            self.options["num_drafts"] = num_drafts
        elif stages > 1:
            self.options["stages"] = stages
        self.num_requests = self.num_epochs = 0
        self.join(0)

    def make(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        beams: tuple[int, float, bool | Literal["never"]],
        priority: int,
        is_job: bool,
        stop_at: int | None,
        ends: tuple[int, ...],
        salt: str | None,
    ) -> TokenizedRequest:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        width, length_penalty, early_stopping = beams
        if stop_at is not None and not width:
            self.world.stop_at[name, 0] = stop_at
        made = request(
            name,
            prompt,
            max_tokens=min(max_tokens, MAX_MODEL_LEN - len(prompt)),
            n=min(n, width or n),
            beam_width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            priority=priority,
            salt=salt,
            stop_token_ids=ends,
            min_tokens=3 if ends else 0,
            ignore_eos=bool(ends),
        )
        return structs.replace(made, is_job=is_job, arrived_s=self.world.now_s)

    requests = st.lists(
        st.tuples(
            prompts(),
            st.integers(1, 40),
            st.sampled_from([1, 1, 1, 2, 3]),
            st.sampled_from(
                [(0, 1.0, False)] * 4 + [(2, 1.0, False), (3, 0.0, True), (4, 2.0, "never"), (1, 1.0, False)]
            ),
            st.sampled_from([0, 0, 0, 1, -1]),
            st.sampled_from([False, False, True]),
            st.none() | st.integers(0, 12),
            st.sampled_from([(), (), (4, 8, 15, 16, 23)]),
            st.sampled_from([None, None, "x", "y"]),
        ),
        min_size=1,
        max_size=6,
    )

    @rule(arriving=requests)
    def arrive(self, arriving: list[tuple[Any, ...]]) -> None:
        self.world.send(*(self.make(*each) for each in arriving))

    @precondition(lambda self: any(executor.queue for executor in self.world.executors.values()))
    @rule(which=st.integers(0, 2), count=st.integers(1, 20))
    def step(self, which: int, count: int) -> None:
        for _ in range(count):
            busy = [name for name, executor in self.world.executors.items() if executor.queue]
            if not busy:
                return
            self.world.step(busy[which % len(busy)])

    @precondition(lambda self: any(executor.disk.orders for executor in self.world.executors.values()))
    @rule(which=st.integers(0, 2), count=st.integers(1, 4))
    def obey(self, which: int, count: int) -> None:
        for _ in range(count):
            names = [name for name, executor in self.world.executors.items() if executor.disk.orders]
            if not names:
                return
            self.world.obey(names[which % len(names)])

    @precondition(lambda self: any(executor.pulls.orders for executor in self.world.executors.values()))
    @rule(which=st.integers(0, 2), count=st.integers(1, 4))
    def pull(self, which: int, count: int) -> None:
        for _ in range(count):
            names = [name for name, executor in self.world.executors.items() if executor.pulls.orders]
            if not names:
                return
            self.world.pull(names[which % len(names)])

    @rule(host=st.booleans(), running=RARELY, really=RARELY)
    def reset(self, host: bool, running: bool, really: bool) -> None:
        if really:
            self.world.send(CachesReset(host=host, running=running))

    @precondition(lambda self: self.world.core.requests)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        names = list(self.world.core.requests)
        self.world.send(AbortRequest(request_id=names[which % len(names)]))

    @precondition(lambda self: self.num_requests)
    @rule(which=st.integers(0, 100))
    def repeat(self, which: int) -> None:
        self.world.send(self.world.requests[f"r{which % self.num_requests}"])

    @rule(which=st.integers(0, 2), really=RARELY)
    def join(self, which: int, really: bool = True) -> None:
        if not really:
            return
        name = f"gpu-{which}"
        if name in self.world.executors:
            self.world.kill(name)
        self.num_epochs += 1
        self.world.join(name=name, epoch=self.num_epochs, disk=self.disks[name], pulls=self.pulls(), **self.options)

    @precondition(lambda self: self.world.executors)
    @rule(which=st.integers(0, 2), suspend=st.booleans(), drains=st.booleans(), really=RARELY)
    def leave(self, which: int, suspend: bool, drains: bool, really: bool) -> None:
        if not really:
            return
        names = list(self.world.executors)
        name = names[which % len(names)]
        if suspend:
            self.world.send(ReplicaSuspended(name, drains))
        else:
            self.world.kill(name)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        for name in [each for each, replica in self.world.core.replicas.items() if replica.suspended]:
            self.world.kill(name)
        self.join(1)
        self.world.run()
        for failure in self.world.failed.values():
            sent = self.world.requests[failure.request_id]
            given_up = failure.status == 500 and self.world.num_kills >= MOST_LOSSES
            sizes = ("num_blocks", "max_num_seqs", "window", "windowed_pages", "windowed_tokens")
            assert given_up or not fits(sent, **{name: self.options[name] for name in sizes})
        self.world.check_end()


class SharedHostTiers(Schedules):
    """Two or three replicas of one host, whose devices are small and whose host tiers are large."""

    @initialize(
        num_blocks=st.integers(12, 18),
        depth=st.sampled_from([1, 2, 2]),
        num_host_blocks=st.sampled_from([8, 60, 60]),
        window=st.sampled_from([0, 0, 0, 13]),
        windowed=st.sampled_from([(0, 0), (0, 0), (0, 0), (2, 6)]),
        copies=st.tuples(st.integers(0, 3), st.sampled_from([0.1, 1.0])),
        disk=st.tuples(st.sampled_from([0, 0, 12]), st.sampled_from([0, 2])),
        num_prefill=st.sampled_from([0, 0, 0, 1]),
        fails=st.sampled_from([0, 0, 5]),
        count=st.sampled_from([2, 2, 3]),
        host=st.sampled_from(["here", "here", "here", ""]),
        step_s=st.sampled_from([0.0, 0.02]),
        ranks=st.sampled_from([1, 1, 2]),
        promises=st.sampled_from([0, 1, 2]),
    )
    def begin(self, count: int, fails: int, **drawn: Any) -> None:
        fixed: dict[str, Any] = {"caching": True, "eos": (), "aging_s": 30.0, "num_drafts": 0, "stages": 1}
        fixed |= {"doubts": 0, "mode": "swap", "budget": 64, "max_num_seqs": 1, "pulls": ("kind", fails, 1e6)}
        super().begin(**fixed | drawn)
        for number in range(1, count):
            self.join(number)


def settings_of(share: float) -> settings:
    return settings(
        max_examples=int(share * int(os.environ.get("PAGEBUS_TEST_SCHEDULES", examples(80)))),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


Schedules.TestCase.settings = settings_of(0.75)
SharedHostTiers.TestCase.settings = settings_of(0.25)
TestSchedules = pytest.mark.usefixtures("small")(Schedules.TestCase)
TestSharedHostTiers = pytest.mark.usefixtures("small")(SharedHostTiers.TestCase)


def located_twice(lending: Lending, places: list[Place], offer: Offer, target: Replica) -> Located | None:
    """The quick way to locate a prefix finds what the other one finds."""
    if (found := in_one(lending, places, offer, target)) is not None:
        num_blocks, wanted, shares = lending._locate(places, target)
        assert found[:2] == (num_blocks, wanted)
        assert [share for share in found[2] if share.blocks] == narrowed(shares, wanted)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long elsewhere happens often."""
    rest_often(monkeypatch)
    split_often(monkeypatch)
    change_often(monkeypatch)
    monkeypatch.setattr(link, "PROBE_BYTES", 2000)
    monkeypatch.setattr(Lending, "_in_one", located_twice)
    monkeypatch.setattr(pulls, "MOST_BYTES", 6000)
    monkeypatch.setattr(ReplicaBase, "has_spare", True)
    monkeypatch.setattr(planner, "FIRST_PULLS", 1)
    for each in (block_pool, prefix_index):
        monkeypatch.setattr(each, "MANY", 3)
