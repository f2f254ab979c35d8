"""Prints what the scheduler costs per step, in CPU time. Run: ``python -m tests.actors.scheduler.bench_core``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque

import numpy as np
from msgspec import structs

from pagebus.actors.model.block_hash import hash_blocks
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.core.placement import choose
from pagebus.actors.scheduler.events import (
    DetokenizersLive,
    Input,
    ReplicaJoined,
    ReplicaResult,
    ReplicaSuspended,
    ToReplica,
)
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.bus.messages import AdapterRead, AdapterSource, PullReport, StepPlan, StepResult
from tests.actors.scheduler.world import request

BLOCK_SIZE = 16
OTHER_MEMORY = np.ones(3_000_000)


class QuickExecutor:
    """Answers plans with token 7 and no checks."""

    def __init__(self, slots: int) -> None:
        self.ids = np.zeros(slots, np.int32)
        self.total = np.zeros(slots, np.int32)
        self.computed = np.zeros(slots, np.int32)
        self.prompt = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.queue: deque[StepPlan] = deque()

    def run_one(self) -> StepResult:
        plan = self.queue.popleft()
        for new in plan.new_sequences:
            self.ids[new.slot], self.total[new.slot], self.prompt[new.slot] = (
                new.sequence_id,
                new.num_tokens,
                new.num_prompt_tokens,
            )
            self.computed[new.slot], self.limit[new.slot] = new.num_computed_tokens, new.max_total_tokens
        self.computed[plan.slots] += plan.num_scheduled
        rows = plan.slots[self.computed[plan.slots] == self.total[plan.slots]]
        indexes = self.total[rows] - self.prompt[rows]
        self.total[rows] += 1
        return StepResult(
            step=plan.step,
            scheduler_epoch=1,
            received_s=0.0,
            launched_s=0.0,
            done_s=0.0,
            num_computed_tokens=int(plan.num_scheduled.sum()),
            sequence_ids=self.ids[rows],
            token_ids=np.full(len(rows), 7, np.int32),
            token_indexes=indexes,
            ends=np.where(self.total[rows] >= self.limit[rows], 2, 0).astype(np.int32),
        )


def measure(
    running: int,
    waiting: int,
    *,
    prompt_tokens: int,
    max_tokens: int,
    steps: int,
    caching: bool,
    itl_s: float | None = None,
    mixed: bool = False,
    window: int = 0,
    windowed_pages: int = 0,
) -> None:
    """``window``: of all layers, or of ``windowed_pages``. ``mixed``: every other request is a job, and priorities
    differ; the steps have times for the fit then."""
    core = Core(
        CoreConfig(
            block_size=BLOCK_SIZE,
            max_num_queued_requests=10**6,
            enable_prefix_caching=caching,
            itl_target_s=itl_s,
            window=0 if windowed_pages else window,
            priority_aging_s=1e-3 if mixed else 30.0,
        )
    )
    executor = QuickExecutor(running)
    core.handle(DetokenizersLive(("text",)))
    core.handle(
        ReplicaJoined(
            replica="gpu",
            epoch=1,
            num_blocks=40_000 * (1 + windowed_pages),
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_model_len=65_536,
            max_num_batched_tokens=8192,
            windowed_pages=windowed_pages,
            windowed_tokens=window if windowed_pages else 0,
        )
    )
    rng = np.random.default_rng(0)
    for i in range(running + waiting):
        prompt = rng.integers(0, 30_000, prompt_tokens).tolist()
        sent = request(
            f"r{i}", prompt, block_size=BLOCK_SIZE, max_tokens=max_tokens, priority=i * 7 % 5 if mixed else 0
        )
        core.handle(structs.replace(sent, arrived_s=i * 1e-4, is_job=mixed and i % 2 == 0))
    take_us, plan_us, rows = [], [], []
    outputs = core.plan(0.0)
    for step in range(steps):
        executor.queue.extend(each.message for each in outputs if isinstance(each, ToReplica))
        result = structs.replace(executor.run_one(), launched_s=step * 0.01, done_s=step * 0.01 + 0.009)
        start = time.thread_time()
        core.handle(ReplicaResult("gpu", result))
        taken = time.thread_time()
        outputs = core.plan(float(step))
        planned = time.thread_time()
        take_us.append((taken - start) * 1e6)
        plan_us.append((planned - taken) * 1e6)
        rows.append(len(result.sequence_ids))
    skip = steps // 4
    take, plan = take_us[skip:], plan_us[skip:]
    print(
        f"{running:4d} running {waiting:6d} waiting  cache {'on ' if caching else 'off'}  "
        f"{'jobs, pacing  ' if mixed else ''}{f'window {window}  ' if window else ''}"
        f"{f'of {windowed_pages} pages  ' if windowed_pages else ''}"
        f"plan: median {statistics.median(plan):6.1f} mean {statistics.mean(plan):6.1f} us   "
        f"result: median {statistics.median(take):6.1f} mean {statistics.mean(take):6.1f} us   "
        f"(mean rows {statistics.mean(rows[skip:]):.0f})"
    )


LONG_TOKENS = 32_768


def look_up(num_replicas: int, where: str) -> None:
    """What it costs to place a prompt of 32k tokens, 2048 hashed blocks: ``where`` they are cached on each replica."""
    core = Core(CoreConfig(block_size=BLOCK_SIZE))
    core.handle(DetokenizersLive(("text",)))
    for number in range(num_replicas):
        core.handle(
            ReplicaJoined(
                replica=f"gpu-{number}",
                epoch=number + 1,
                num_blocks=40_000,
                block_size=BLOCK_SIZE,
                max_num_seqs=256,
                max_model_len=65_536,
                max_num_batched_tokens=8192,
                num_host_blocks=40_000,
            )
        )
    prompt = np.random.default_rng(0).integers(0, 30_000, LONG_TOKENS).tolist()
    core.handle(request("long", prompt, block_size=BLOCK_SIZE, max_tokens=100))
    (sequence,) = core.waiting
    for replica in core.replicas.values():
        for block, block_hash in enumerate(sequence.hashes):
            if where == "device":
                replica.index.insert(block_hash, block)
            elif where == "host":
                (host,) = replica.host_tier.pool.allocate(1)
                replica.host_tier.pool.index.insert(block_hash, host)
                replica.host_tier.pool.release((host,))
        replica.index.new_anchors += sequence.hashes[:1] if where != "nowhere" else []
    fleet, times = core.planner.fleet, []
    for _ in range(200):
        for replica in core.replicas.values():
            fleet.outdate(replica)
        start = time.thread_time()
        fleet.refresh()
        chosen = choose(sequence, fleet, fleet.open[0] & fleet.can_hold(sequence), Pulls())
        times.append((time.thread_time() - start) * 1e6)
        assert chosen is not None
        assert chosen[1].num_tokens == (0 if where == "nowhere" else LONG_TOKENS - BLOCK_SIZE)
    print(
        f"{LONG_TOKENS} tokens, {num_replicas:3d} replicas, cached {where:8s} "
        f"placed in: median {statistics.median(times):6.1f} mean {statistics.mean(times):6.1f} us"
    )


def pull(prompt_tokens: int, *, cold: bool = False) -> None:
    """What it costs to run a prompt behind blocks that are pulled from a neighbour whose only slot is taken, and then
    behind one's own: until the plan that pulls, from the report to the plan that computes, and until that plan. What is
    left to do behind these plans is not counted.
    ``cold``: 24 MB of other memory are read before each, as others use the caches of a scheduler with little to do."""
    core = Core(CoreConfig(block_size=BLOCK_SIZE))
    core.handle(DetokenizersLive(("text",)))
    for number, name in enumerate(("lender", "target")):
        core.handle(ReplicaJoined(
            replica=name, epoch=number + 1, num_blocks=40_000, block_size=BLOCK_SIZE, max_num_seqs=1,
            max_model_len=65_536, max_num_batched_tokens=8192, num_host_blocks=4096, block_bytes=2**21,
            prefill_tokens_per_s=36_000.0, copy_bytes_per_s=50e9, kv_address=name, kv_kind="alike", kv_host="here",
        ))  # fmt: skip
    lender, target = (core.replicas[name] for name in ("lender", "target"))
    busy, executor, rng = QuickExecutor(1), QuickExecutor(1), np.random.default_rng(0)
    core.handle(request("busy", rng.integers(0, 30_000, 64).tolist(), block_size=BLOCK_SIZE, max_tokens=60_000))
    pulled, took, own = [], [], []

    def timed(message: Input, to: list[float] | None = None) -> list[StepPlan]:
        if cold:
            OTHER_MEMORY.sum()
        start, plans = time.thread_time(), list[ToReplica]()
        core.handle(message)
        for part in core.plan_in_turns(0.0):
            plans += [each for each in part if isinstance(each, ToReplica)]
            if to is not None and plans:
                to.append((time.thread_time() - start) * 1e6)
                to = None
        busy.queue.extend(each.message for each in plans if each.replica == "lender")
        return [each.message for each in plans if each.replica == "target"]

    def answer(plans: list[StepPlan]) -> None:
        while plans:
            executor.queue.extend(plans)
            ran = executor.queue[0].step
            plans = timed(ReplicaResult("target", structs.replace(executor.run_one(), copied_step=ran)))

    prompts = [rng.integers(0, 30_000, prompt_tokens).tolist() for _ in range(30)]
    for prompt in prompts:
        hashes = hash_blocks(np.array(prompt, np.int32), BLOCK_SIZE)
        lender.index.insert_all(hashes, blocks := lender.pool.allocate(len(hashes)), 0, len(hashes))
        lender.pool.release(reversed(blocks))
    core.planner.pulls.link(lender, target).ended(0, there=True, bytes_per_s=330e9)
    core.plan(0.0)
    assert len(lender.slots) == 1
    for number, prompt in enumerate(prompts):
        sent = [
            request(f"{turn} {number}", [*prompt, number, turn], block_size=BLOCK_SIZE, max_tokens=1) for turn in (1, 2)
        ]
        plans = timed(sent[0], pulled)
        (order,) = plans[0].pulls
        assert len(plans[0].pull_blocks) == prompt_tokens // BLOCK_SIZE
        answer(plans)
        report = PullReport(
            replica="target", executor_epoch=2, scheduler_epoch=1, pull=order.pull, there=True, bytes_per_s=330e9
        )
        plans = timed(report, took)
        assert plans[0].num_scheduled.sum() == prompt_tokens % BLOCK_SIZE + 2
        answer(plans)
        answer(timed(sent[1], own))
    core.planner.check_integrity()
    assert target.moves.num_pulled == 30 * (prompt_tokens // BLOCK_SIZE)
    print(
        f"{prompt_tokens} tokens{', cold' if cold else ''}: pull planned {statistics.median(pulled):6.1f} us   "
        f"step planned {statistics.median(took):6.1f} us   behind its own {statistics.median(own):6.1f} us"
    )


def drain(streams: int = 64, tokens: int = 840) -> None:
    """What it costs to move all sequences of a replica at once: until each plan that pulls goes out."""
    core = Core(CoreConfig(block_size=BLOCK_SIZE, pipeline_depth=4))
    core.handle(DetokenizersLive(("text",)))
    executors, rng = {name: QuickExecutor(streams) for name in ("lender", "target")}, np.random.default_rng(0)

    def join(name: str) -> None:
        core.handle(ReplicaJoined(
            replica=name, epoch=len(core.replicas) + 1, num_blocks=40_000, block_size=BLOCK_SIZE, max_num_seqs=streams,
            max_model_len=65_536, max_num_batched_tokens=8192, block_bytes=2**21, prefill_tokens_per_s=36_000.0,
            copy_bytes_per_s=50e9, kv_address=name, kv_kind="alike", kv_host="here",
        ))  # fmt: skip

    def plan() -> list[tuple[float, int]]:
        """Send all plans. Those that pull: milliseconds until they go out, and how many pulls each has."""
        began_s, found = time.thread_time(), []
        for output in itertools.chain.from_iterable(core.plan_in_turns(0.0)):
            if isinstance(output, ToReplica):
                executors[output.replica].queue.append(output.message)
                if output.message.pulls:
                    found.append(((time.thread_time() - began_s) * 1e3, len(output.message.pulls)))
        return found

    def step(name: str) -> list[tuple[float, int]]:
        result = executors[name].run_one()
        core.handle(ReplicaResult(name, structs.replace(result, copied_step=result.step)))
        return plan()

    join("lender")
    for number in range(streams):
        prompt = rng.integers(0, 30_000, tokens).tolist()
        core.handle(request(f"{number}", prompt, block_size=BLOCK_SIZE, max_tokens=60_000))
    plan()
    for _ in range(20):
        step("lender")
    join("target")
    core.planner.pulls.link(*core.replicas.values()).ended(0, there=True, bytes_per_s=330e9)
    core.handle(request("first", [1], block_size=BLOCK_SIZE, max_tokens=1))
    plan()
    while executors["target"].queue:
        step("target")
    core.handle(ReplicaSuspended("lender", drains=True))
    found = plan()
    while executors["lender"].queue:
        found += step("lender")
    plans = ", ".join(f"{count} after {at_ms:.1f}" for at_ms, count in found)
    print(f"{streams} sequences of {tokens} tokens move, pulls and milliseconds: {plans}")


def adapters(registered: int, places: int, requests: int) -> None:
    """Steps, and what plans cost, of requests that come at once and name adapters as often as Zipf's law says: 512
    tokens in and 128 out, in 256 rows. An adapter is read, before the next step, once a plan names it."""
    core, executor = Core(CoreConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)), QuickExecutor(256)
    core.handle(DetokenizersLive(("text",)))
    core.handle(ReplicaJoined(
        replica="gpu", epoch=1, num_blocks=50_000, block_size=BLOCK_SIZE, max_num_seqs=256, max_model_len=1024,
        max_num_batched_tokens=8192, max_loras=places, most_loras=max(places, registered),
    ))  # fmt: skip
    shares = 1 / np.arange(1, registered + 1)
    drawn = np.random.default_rng(0).choice(registered, requests, p=shares / shares.sum()).tolist()
    for number, adapter in enumerate(drawn):
        source = AdapterSource(name=f"{adapter}", path="/", digest=f"{adapter:032x}")
        sent = request(f"{number}", list(range(512)), block_size=BLOCK_SIZE, max_tokens=128)
        core.handle(structs.replace(sent, adapter=source))
    rows, times = [], []
    while core.waiting or executor.queue:
        start = time.thread_time()
        outputs = core.plan(0.0)
        times.append((time.thread_time() - start) * 1e3)
        for plan in (each.message for each in outputs if isinstance(each, ToReplica)):
            executor.queue.append(plan)
            for each in plan.loaded_adapters:
                core.handle(AdapterRead(
                    replica="gpu", executor_epoch=1, scheduler_epoch=1, step=plan.step, digest=each.digest,
                    num_blocks=40,
                ))  # fmt: skip
        if executor.queue:
            rows.append(executor.queue[0].num_decodes)
            core.handle(ReplicaResult("gpu", executor.run_one()))
    print(
        f"{requests:4d} requests, {len(set(drawn)):3d} of {registered:4d} adapters, {places:3d} places: "
        f"{len(rows)} steps of {statistics.mean(rows):.0f} decodes, a plan takes {statistics.mean(times):.2f} ms, "
        f"{max(times):.1f} at most"
    )


if __name__ == "__main__":
    for registered, places, requests in itertools.product((64, 1000), (64, 256), (256, 1024)):
        adapters(registered, places, requests)
    for num_replicas, where in itertools.product((1, 8, 256), ("nowhere", "device", "host")):
        look_up(num_replicas, where)
    for running in (1, 32, 256):
        measure(running, 0, prompt_tokens=64, max_tokens=2000, steps=1200, caching=True)
    for prompt_tokens, cold in itertools.product((1000, 15_000), (False, True)):
        pull(prompt_tokens, cold=cold)
    drain()
    measure(256, 0, prompt_tokens=64, max_tokens=2000, steps=1200, caching=False)
    measure(256, 0, prompt_tokens=64, max_tokens=2000, steps=1200, caching=True, window=128)
    for pages in (1, 5):
        measure(256, 0, prompt_tokens=64, max_tokens=2000, steps=1200, caching=True, window=128, windowed_pages=pages)
    measure(256, 10_000, prompt_tokens=64, max_tokens=150, steps=1500, caching=True)
    measure(256, 10_000, prompt_tokens=64, max_tokens=150, steps=1500, caching=True, mixed=True, itl_s=0.02)
