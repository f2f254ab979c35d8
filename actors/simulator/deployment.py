"""One simulated run: clients, scheduler and executors put together from settings, a trace and a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.settings import Settings
from pagebus.actors.settings.combinations.roles import AUTO, num_prefill
from pagebus.actors.settings.combinations.speculation import speculation
from pagebus.actors.simulator.clients import Clients, Slo
from pagebus.actors.simulator.drafting_executor import DraftingExecutor
from pagebus.actors.simulator.executor import ModelExecutor
from pagebus.actors.simulator.faults import Fault, FaultError
from pagebus.actors.simulator.links import LinkSpeed
from pagebus.actors.simulator.profile import Profile
from pagebus.actors.simulator.recording.trace import Trace
from pagebus.actors.simulator.simulation import Observer, Simulation, Timing

DEFAULT_BUDGET = 8192
LONGEST_STAY_S = 5.0
"""The longest that a draining executor stays for those that pull from it, if ``--drain-timeout-s`` allows it."""


def core_config(settings: Settings) -> CoreConfig:
    """What the scheduler actor gives its core, from the same settings."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(CoreConfig):
        if hasattr(settings, spec.name):
            values[spec.name] = getattr(settings, spec.name)
        elif spec.name.endswith("_s") and hasattr(settings, spec.name[:-1] + "ms"):
            value = getattr(settings, spec.name[:-1] + "ms")
            values[spec.name] = None if value is None else value / 1e3
    values["priorities"] = settings.scheduling_policy == "priority"
    values["num_prefill"], values["auto_roles"] = num_prefill(settings.roles), settings.roles == AUTO
    return CoreConfig(**values)


class Deployment:
    """``num_executors`` executors named ``executor-0`` and so on, each like ``profile`` says, and the clients of
    ``trace``. After :meth:`run`, ``clients`` and ``simulation`` hold what came of it.

    Args:
        check: check every invariant of the core after every step.
        acceptance: the chance of a draft to be right, where the settings speculate.
        link: over which each executor pulls blocks from the others; None: they pull none. Out of host tiers blocks come
            as quickly as they are copied to and from one's own.
    """

    def __init__(
        self,
        trace: Trace,
        profile: Profile,
        settings: Settings,
        *,
        num_executors: int = 1,
        faults: Sequence[Fault] = (),
        slo: Slo | None = None,
        check: bool = False,
        clients: Callable[..., Clients] = Clients,
        acceptance: float = 0.0,
        link: LinkSpeed | None = None,
    ) -> None:
        self.profile, self.settings, self._acceptance = profile, settings, acceptance
        self._pulls = link is not None and settings.enable_prefix_caching
        self.block_size = settings.block_size
        self.clients = clients(
            trace,
            self.block_size,
            request_s=profile.request_s,
            reply_s=profile.reply_s,
            slo=slo or Slo(),
            max_model_len=settings.max_model_len or profile.max_model_len,
            tokenizer_token_s=profile.tokenizer_token_s,
        )
        config = dataclasses.replace(core_config(settings), window=profile.window)
        if link is not None:
            link = dataclasses.replace(link, host_bytes_per_s=profile.copy_bytes_per_s)
        self.simulation = Simulation(config, self.clients, _timing(profile, settings), check=check, link=link)
        self._num_executors = 0
        self.add(0.0, num_executors)
        known = num_executors + sum(fault.count for fault in faults)
        self._plan_faults(faults, {self._name(number) for number in range(known)})

    def _plan_faults(self, faults: Sequence[Fault], names: set[str]) -> None:
        for fault in faults:
            if fault.verb != "add" and fault.executor not in names:
                raise FaultError(f"there is no executor {fault.executor!r}")
            self.simulation.at(fault.at_s, self._action(fault))

    @staticmethod
    def _name(number: int) -> str:
        return f"executor-{number}"

    def _action(self, fault: Fault) -> Callable[[float], None]:
        if fault.verb == "add":
            return lambda at_s: self.add(at_s, fault.count)
        act = self.simulation.kill if fault.verb == "kill" else self.simulation.drain
        return lambda at_s: act(at_s, fault.executor)

    def watch(self, observer: Observer) -> None:
        """Add an observer of the clients' messages, called after the clients."""
        self.simulation.watch(observer)

    def add(self, at_s: float, count: int) -> None:
        """More executors are ready."""
        for _ in range(count):
            joined, model = self._joined(), (self.profile, self.clients.output_tokens_of)
            drafts = joined.num_drafts > 0
            executor = DraftingExecutor(joined, *model, self._acceptance) if drafts else ModelExecutor(joined, *model)
            self._num_executors += 1
            self.simulation.join(at_s, executor)

    def _joined(self) -> ReplicaJoined:
        profile, settings = self.profile, self.settings
        block_bytes = profile.kv_bytes_per_token * self.block_size // (1 + profile.windowed_pages)
        num_blocks = settings.num_gpu_blocks_override or profile.num_blocks * profile.block_size // self.block_size
        name, epoch = self._name(self._num_executors), self.simulation.next_epoch()
        return ReplicaJoined(
            replica=name,
            epoch=epoch,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len or profile.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens or DEFAULT_BUDGET,
            num_host_blocks=int(settings.swap_space * 2**30) // block_bytes,
            block_bytes=block_bytes,
            copy_bytes_per_s=profile.copy_bytes_per_s,
            prefill_tokens_per_s=profile.prefill_tokens_per_s,
            windowed_pages=profile.windowed_pages,
            windowed_tokens=profile.windowed_tokens,
            num_drafts=0 if settings.spec_method is None else speculation(settings).tokens,
            kv_kind="modelled" if self._pulls else "",
            kv_address=f"{name}@{epoch}" if self._pulls else "",
            kv_host="host" if self._pulls and settings.swap_space and settings.executors > 1 else "",
        )

    def run(self) -> None:
        """From the first arrival until nothing happens any more."""
        self.clients.start(self.simulation)
        self.simulation.run()


def _timing(profile: Profile, settings: Settings) -> Timing:
    return Timing(
        bus_s=profile.bus_s,
        input_s=profile.scheduler_input_s,
        plan_s=profile.scheduler_plan_s,
        lease_ttl_s=settings.lease_ttl_s,
        stay_s=min(LONGEST_STAY_S, settings.drain_timeout_s / 2),
    )
