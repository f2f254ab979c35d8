"""One random schedule from one number: a small deployment with executors that believe nothing, on the simulator's
clock, where everything happens that can happen, at any time and in any order."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from msgspec import structs

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.events import Note, ReplicaJoined, ReplicaSuspended, ToDetokenizer, ToIngress
from pagebus.actors.simulator.simulation import Observer, Simulation, Timing
from pagebus.bus.messages import (
    AbortRequest,
    RequestFailed,
    SequenceEnded,
    SequenceStarted,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, fits, request

MAX_MODEL_LEN = 48
BLOCK_SIZE = 4
FAMILIES = [[(a * i * i + b * i + 3) % 40 for i in range(48)] for a, b in ((1, 5), (3, 7), (2, 11))]
STEP_S = 0.004
DELAYS_S = (0.0, 0.5 * STEP_S, STEP_S, 2 * STEP_S, 5 * STEP_S)


class TimedExecutor:
    """A fake executor whose steps take random times."""

    def __init__(self, fake: FakeExecutor, rng: random.Random) -> None:
        self.fake = fake
        self._rng = rng

    @property
    def joined(self) -> ReplicaJoined:
        return self.fake.joined

    def execute(self, plan: StepPlan, received_s: float, free_s: float) -> StepResult:
        self.fake.submit(plan)
        result = self.fake.run_one()
        done_s = max(received_s, free_s) + self._rng.choice(DELAYS_S)
        return structs.replace(result, received_s=received_s, launched_s=received_s, done_s=done_s)


class Listener(Observer):
    """Tells the world what its detokenizer, ingress and log hear. Stops found reach the scheduler some time later."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.simulation: Simulation | None = None
        self._rng = rng

    def started(self, at_s: float, started: SequenceStarted) -> None:
        self.world._receive(ToDetokenizer("text", started))
        assert self.simulation is not None
        for message in self.world.pending:
            self.simulation.at(at_s + self._rng.choice(DELAYS_S), message)
        self.world.pending.clear()

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        self.world._receive(ToDetokenizer("text", ended))

    def failed(self, at_s: float, failed: RequestFailed) -> None:
        self.world._receive(ToIngress("web", failed))

    def over(self, at_s: float, request_id: str) -> None:
        self.world.over.add(request_id)

    def noted(self, at_s: float, note: Note) -> None:
        self.world.notes.append(note)

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        assert self.simulation is not None
        for stop in self.world._listen(result):
            self.simulation.at(at_s + self._rng.choice(DELAYS_S), stop)


class Schedule:
    """Everything that :func:`run_schedule` decides, in one place. ``mode``: what preemption may do."""

    def __init__(self, seed: int, mode: str) -> None:
        self.rng = rng = random.Random(seed)
        self.config = CoreConfig(
            block_size=BLOCK_SIZE,
            pipeline_depth=rng.randint(1, 4),
            enable_prefix_caching=rng.random() < 0.7,
            eos_token_ids=rng.choice([(), (0,), (0, 5, 9, 17)]),
            priority_aging_s=rng.choice([0.0001, 0.01, 30.0]),
            itl_target_s=rng.choice([None, None, None, 2 * STEP_S]),
            preemption_mode=mode,
            window=random.Random(-seed - 1).choice([0, 0, 1, 3, 6, 13]),  # apart: seeds stay what they were without
        )
        self.options: dict[str, Any] = {
            "num_blocks": rng.randint(8, 22),
            "budget": rng.choice([4, 8, 16, 64]),
            "max_num_seqs": rng.randint(1, 6),
            "max_model_len": MAX_MODEL_LEN,
            "depth": self.config.pipeline_depth,
            "window": self.config.window,
        }
        apart = random.Random(-seed - 2)  # seeds stay what they were where this chooses nothing
        if not self.config.window and apart.random() < 0.5:
            each = apart.choice([1, 2, 3])
            self.options["num_blocks"] *= 1 + each - (apart.random() < 0.5)
            self.options |= {"windowed_pages": each, "windowed_tokens": apart.choice([1, 3, 6, 13])}
        if mode != "recompute":
            self.options["num_host_blocks"] = rng.choice([0, 2, 6, 20])
        self.world = World(**dataclasses.asdict(self.config))
        listener = Listener(self.world, rng)
        timing = Timing(
            bus_s=rng.choice([0.0, 0.001, STEP_S]),
            input_s=rng.choice([0.0, 0.0, 0.001]),
            plan_s=rng.choice([0.0, 0.0, 0.001]),
            lease_ttl_s=rng.choice([0.0, STEP_S, 10 * STEP_S]),
        )
        self.simulation = listener.simulation = Simulation(self.config, listener, timing, check=True)
        self.world.core = self.simulation.core
        self.length_s = rng.choice([0.0, 5, 20]) * STEP_S

    def some_time(self) -> float:
        """A moment of the schedule; often the same as others."""
        return self.length_s * self.rng.randint(0, 12) / 10

    def join(self, at_s: float, name: str) -> None:
        """An executor joins, or joins anew after a crash."""
        epoch = self.simulation.next_epoch()
        fake = FakeExecutor(name=name, epoch=epoch, **self.options)
        if name in self.simulation.core.replicas:
            fake.last_step = self.simulation.core.replicas[name].step
        else:
            fake.last_step = self.simulation.core.planner.next_steps.get(name, 1) - 1
        self.simulation.join(at_s, TimedExecutor(fake, self.rng))

    def send(self, message: TokenizedRequest | AbortRequest, at_s: float) -> None:
        """A message reaches the scheduler; requests may come twice."""
        if isinstance(message, TokenizedRequest):
            message = structs.replace(message, arrived_s=at_s)
            self.world.requests[message.request_id] = message
            if self.rng.random() < 0.05:
                self.simulation.at(at_s + self.rng.choice(DELAYS_S), message)
        else:
            self.world.aborted.add(message.request_id)
        self.simulation.at(at_s, message)

    def request(self, name: str) -> TokenizedRequest:
        """A request that often shares a prefix with others."""
        rng = self.rng
        prompt = rng.choice(FAMILIES)[: rng.randint(1, 24)] + [rng.randrange(40) for _ in range(rng.randint(0, 3))]
        ends: tuple[int, ...] = rng.choice([(), (), (4, 8, 15, 16, 23)])
        width = rng.choice([0, 0, 0, 0, 1, 2, 3, 4])
        if rng.random() < 0.15 and not width:
            self.world.stop_at[name, 0] = rng.randint(0, 8)
        made = request(
            name,
            prompt,
            max_tokens=rng.randint(1, min(20, MAX_MODEL_LEN - len(prompt))),
            n=min(rng.choice([1, 1, 1, 2, 3]), width or 3),
            beam_width=width,
            length_penalty=rng.choice([1.0, 0.0, 2.0]),
            early_stopping=rng.choice([False, False, True, "never"]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            stop_token_ids=ends,
            min_tokens=3 if ends else 0,
            ignore_eos=bool(ends),
        )
        return structs.replace(made, is_job=rng.random() < 0.2)

    def events(self) -> None:
        """Put everything that will happen on the clock."""
        rng, simulation = self.rng, self.simulation
        for number in range(rng.choice([1, 1, 2])):
            self.join(0.0, f"gpu-{number}")
        for number in range(rng.randint(1, 7)):
            at_s = self.some_time()
            self.send(self.request(f"r{number}"), at_s)
            if rng.random() < 0.15:  # sometimes overtaking its request
                abort = AbortRequest(request_id=f"r{number}")
                self.send(abort, max(0.0, at_s + rng.choice([-STEP_S, 0.0, STEP_S, 4 * STEP_S, 9 * STEP_S])))
        for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
            name, at_s = f"gpu-{rng.randrange(3)}", self.some_time()
            what = rng.choice(["kill", "kill", "drain", "join", "join", "suspend"])
            if what == "join":
                simulation.at(at_s, lambda at_s, name=name: self.join(at_s, name))
            elif what == "suspend":
                simulation.at(at_s, ReplicaSuspended(name))
            else:
                act = simulation.kill if what == "kill" else simulation.drain
                simulation.at(at_s, lambda at_s, name=name, act=act: act(at_s, name))


def run_schedule(seed: int, mode: str = "auto") -> Schedule:
    """One schedule with all checks.

    Raises:
        AssertionError, or whatever went wrong.
    """
    schedule = Schedule(seed, mode)
    schedule.events()
    simulation, world = schedule.simulation, schedule.world
    simulation.run()
    for name in [name for name, replica in simulation.core.replicas.items() if replica.suspended]:
        simulation.kill(simulation.now_s, name)
    simulation.at(simulation.now_s + 1.0, lambda at_s: schedule.join(at_s, "gpu-9"))
    simulation.run()
    for failure in world.failed.values():
        sent = world.requests[failure.request_id]
        slots = min(schedule.options["max_num_seqs"], schedule.options["budget"])
        options = schedule.options
        pages = {name: options.get(name, 0) for name in ("windowed_pages", "windowed_tokens")}
        misfit = not fits(sent, options["num_blocks"], slots, window=schedule.config.window, **pages)
        assert misfit, f"refused for no reason: {failure}"
    world.executors = {name: member.executor.fake for name, member in simulation.members.items()}  # type: ignore[attr-defined]
    world.check_end()
    return schedule
