"""What loading gives: an engine's parts, and what its executor tells of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from pagebus.actors.executor.adapters.residents import Residents
from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.device.promises import Promise
from pagebus.actors.executor.memory.disk_tier import DiskTier
from pagebus.actors.executor.memory.swap import NO_LOADS, Copies
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.step.prefill_backend import PrefillBackend
from pagebus.actors.executor.step.runner import Runner
from pagebus.bus.messages import StepPlan


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine that is ready can hold; the scheduler plans by it. Fields with the names of those of
    :class:`BatchLimits` are these."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    device: str
    dtype: str
    num_host_blocks: int = 0
    """Those of the host tier that are ready by now; more may come."""
    block_bytes: int = 0
    copy_bytes_per_s: float = 0.0
    """Between the tiers, the slower way's; measured, 0 without a host tier."""
    prefill_tokens_per_s: float = 0.0
    """Measured, 0 without a host tier."""
    kv_cache_dtype: str = ""
    window: int = 0
    """How many tokens, the newest included, some layer may still read; 0: all."""
    windowed_pages: int = 0
    windowed_tokens: int = 0
    """As of :class:`BatchLimits`: all blocks that are counted here are then pages."""
    num_drafts: int = 0
    """The most drafts that a row may have; 0: nothing is speculated."""
    max_loras: int = 0
    """The most adapters that sequences may have at a time; 0: none."""
    most_loras: int = 0
    """The most adapters in memory."""
    num_disk_blocks: int = 0
    """Those that the disk tier may hold."""
    stages: int = 1
    """Of the pipeline that the executor is; see :mod:`pagebus.actors.scheduler.replica.pipeline`."""
    kv_kind: str = ""
    """What its blocks are computed by: executors with the same may use each other's. Empty: blocks do not move."""
    kv_address: str = ""
    """Where others find its blocks; it may hold a secret (:mod:`pagebus.actors.executor.moves.carriers.address`)."""
    kv_host: str = ""
    """The host whose executors can read its host tier; empty: none can."""

    def for_logs(self) -> dict[str, Any]:
        """The fields without secrets."""
        told = asdict(self)
        del told["kv_address"]
        return told


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine's parts, ready to run steps."""

    batch: PersistentBatch
    runner: Runner
    copies: Copies
    prefill_backend: PrefillBackend
    info: EngineInfo
    residents: Residents | None
    """Adapters, if there may be any."""
    disk: DiskTier | None = None
    moves: Moves | None = None

    def begin_pulls(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """Begin the pulls of a plan that need not wait for the steps before it. Not the device thread."""
        if self.moves is not None:
            self.moves.begin(plan, scheduler_epoch)

    def follow_promises(self) -> tuple[Promise, ...]:
        """Have the device wait for blocks that have been promised, before it does anything of the next plan."""
        return () if self.moves is None else self.moves.promises.follow()

    def copy(self, plan: StepPlan, scheduler_epoch: int) -> torch.cuda.Event | None:
        """Follow a plan with its adapters, and start its copies between the tiers, as of :class:`Copies`, theirs, what
        is to be read and written, and what is pulled.

        Raises:
            PlanError: a block or an adapter does not exist, or nothing can be pulled here.
        """
        adapters = NO_LOADS if self.residents is None else self.residents.apply(plan, scheduler_epoch)
        copied = self.copies.apply(plan, adapters)
        if self.disk is not None:
            self.disk.apply(plan, scheduler_epoch, self.copies.mark)
        if self.moves is not None:
            self.moves.apply(plan, scheduler_epoch, self.copies.mark)
        elif plan.pulls:
            raise PlanError("pulls, but this executor's blocks do not move")
        return copied

    def free(self) -> None:
        """Give back the host tier's memory, and the disk tier's files. Nobody can read the cache any more."""
        if self.moves is not None:
            self.moves.close()
        if self.disk is not None:
            self.disk.close()
        self.copies.memory.close()
