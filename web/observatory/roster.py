"""The roster: which actors are alive or gone, how busy each is, and the lengths of the streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebus.actors.runtime.actor import actor_of
from pagebus.actors.settings import KINDS
from pagebus.actors.telemetry.progress import graphs_of
from pagebus.bus.contract import Bus, LeaseInfo
from pagebus.bus.streams import Names
from pagebus.web.observatory.chronicle import BACK, DIED, ENDED, JOINED, MOVED, RENEWED, Chronicle, Incident

GONE_S = 600.0
"""Seconds for which an actor that has left is shown."""
ORDER_TTL_S = 60.0
"""Seconds for which an operator's order may be obeyed."""
RATES = {
    "ingress": ("vllm:generation_tokens", "tokens/s"),
    "tokenizer": ("pagebus:tokenizer_requests", "requests/s"),
    "scheduler": ("pagebus:scheduler_busy_seconds_total", "busy"),
    "executor": ("pagebus:executor_steps_total", "steps/s"),
    "rank": ("pagebus:executor_steps_total", "steps/s"),
    "detokenizer": ("pagebus:detokenizer_tokens", "tokens/s"),
}
"""The metrics shown for each kind of actor."""
COMPUTE = ("executor", "rank")
"""Kinds that have a device: an executor is rank 0, if there are others."""
CPU, MEMORY = "process_cpu_seconds_total", "process_resident_memory_bytes"
STARTED = "process_start_time_seconds"
GPU_MEMORY, GPU_CAPACITY = "pagebus:gpu_memory_bytes", "pagebus:gpu_memory_capacity_bytes"
GPU_BUSY = "pagebus:executor_busy_seconds_total"
PATHS = "pagebus:attention_steps_total"
EXPERT_LOAD, EXPERTS_UNUSED = "pagebus:expert_load_ratio", "pagebus:experts_unused"


@dataclass(slots=True)
class Member:
    """One actor by its name. ``starts`` counts its lives seen by this ingress, ``gone_s`` is when the last one left.
    ``lost_s``: when its last life ended, until the next one is ready; ``drained``: that was no accident.
    ``ready_epoch``: the life that was ready last; None: none was. ``ordered_s``: when an operator told it to end."""

    lease: LeaseInfo
    chronicle: Chronicle
    starts: int = 1
    gone_s: float | None = None
    lost_s: float | None = None
    drained: bool = False
    ready_epoch: int | None = None
    ordered_s: float = -math.inf
    counted: tuple[float, dict[str, float]] | None = None
    """When its metrics were last shown, and their values."""
    paths: dict[str, float] | None = None
    """Steps by attention path at that time."""

    @property
    def is_ready(self) -> bool:
        return self.lease.info.get("state") == "ready"

    def renew(self, lease: LeaseInfo, now_s: float) -> None:
        """Update the member with its lease, of the same life or a new one."""
        if self.lease.epoch != lease.epoch:
            self.starts += 1
            self._end(now_s)
        self.lease, self.gone_s = lease, None
        if self.is_ready:
            self._arrive(now_s)

    def leave(self, now_s: float) -> None:
        """Note that the member has no lease."""
        if self.gone_s is None:
            self.gone_s = now_s
            self._end(now_s)

    def show(self, now_s: float, values: dict[str, float], paths: dict[str, float]) -> None:
        """Note the metrics that are shown now: the next rates are of the time since then."""
        self.counted, self.paths = (now_s, values), paths

    def _arrive(self, now_s: float) -> None:
        """It is ready, or still is."""
        if self.lost_s is not None:
            what = RENEWED if self.ready_epoch == self.lease.epoch else BACK
            self._note(what, now_s, after_s=now_s - self.lost_s)
        elif self.ready_epoch is None:
            self._note(JOINED, now_s)
        self.lost_s, self.ready_epoch = None, self.lease.epoch

    def _end(self, now_s: float) -> None:
        if self.lost_s is None:
            was_ordered, self.ordered_s = now_s - self.ordered_s < ORDER_TTL_S, -math.inf
            self.lost_s, self.drained = now_s, was_ordered or self.lease.info.get("state") == "draining"
            self._note(ENDED if self.drained else DIED, now_s)

    def _note(self, what: str, now_s: float, after_s: float | None = None) -> None:
        self.chronicle.note(Incident(now_s, what, actor_of(self.lease), after_s))


class Roster:
    """The roster. Leases update it twice a second, which is cheap; the rest is read only for connected pages."""

    def __init__(self) -> None:
        self.chronicle = Chronicle()
        self._members: dict[tuple[str, str], Member] = {}
        self._holders: dict[tuple[str, str], str] = {}
        """The last holder of each exclusive role's lease."""

    def update(self, leases: Sequence[LeaseInfo], now_s: float | None = None) -> None:
        """Update the roster with all current leases."""
        now_s = time.time() if now_s is None else now_s
        is_first, present = not self._members, {(lease.kind, actor_of(lease)) for lease in leases}
        for key in [key for key in self._members if key not in present]:
            member = self._members[key]
            member.leave(now_s)
            if now_s - (member.gone_s or now_s) > GONE_S:
                del self._members[key]
        for lease in leases:
            self._follow_role(lease, now_s)
            known = self._members.get((lease.kind, actor_of(lease)))
            if known is None:
                known = Member(lease, self.chronicle)
                known.ready_epoch = lease.epoch if is_first and known.is_ready else None
                self._members[lease.kind, actor_of(lease)] = known
            known.renew(lease, now_s)

    def _follow_role(self, lease: LeaseInfo, now_s: float) -> None:
        """Note that another actor than before holds the lease of an exclusive role."""
        role, actor = (lease.kind, lease.name), actor_of(lease)
        if lease.name == actor:
            return
        before, self._holders[role] = self._holders.get(role, actor), actor
        if before != actor:
            self.chronicle.note(Incident(now_s, MOVED, actor, before=before))

    def find(self, kind: str, actor: str) -> LeaseInfo | None:
        """The lease of a live actor; None if there is none."""
        member = self._members.get((kind, actor))
        return None if member is None or member.gone_s is not None else member.lease

    def ordered(self, kind: str, actor: str, now_s: float | None = None) -> None:
        """Note that an operator has told an actor to end; that it drains may be too short to be seen."""
        if (member := self._members.get((kind, actor))) is not None:
            member.ordered_s = time.time() if now_s is None else now_s

    def rows(self, snapshots: Mapping[str, Mapping[str, Any] | None], now_s: float) -> list[dict[str, Any]]:
        """All actors, with what their metrics (by :func:`key_of`) say of the time since the last call."""
        return [self._row(member, snapshots, now_s) for _, member in sorted(self._members.items())]

    def _row(self, member: Member, snapshots: Mapping[str, Mapping[str, Any] | None], now_s: float) -> dict[str, Any]:
        lease, info = member.lease, member.lease.info
        key = key_of(lease)
        values = _values(snapshots.get(key))
        then_s, before = member.counted or (now_s, values)

        def rate(name: str) -> float | None:
            if name not in values or name not in before or now_s <= then_s:
                return None
            return float(f"{max(0.0, values[name] - before[name]) / (now_s - then_s):.3g}")

        paths = _by_label(snapshots.get(key), PATHS, "path")
        paths_before = paths if member.paths is None else member.paths
        counted, unit = RATES.get(lease.kind, ("", ""))
        member.show(now_s, values, paths)
        state = "gone" if member.gone_s is not None else str(info.get("state"))
        phase, progress = _progress(state, info)
        return {
            "kind": lease.kind,
            "name": actor_of(lease),
            "epoch": lease.epoch,
            "state": f"stalled {info['stalled_s']} s" if state == "ready" and info.get("stalled_s") else state,
            "phase": phase,
            "progress": progress,
            "gone_s": member.gone_s,
            "lost_s": member.lost_s,
            "drained": member.drained,
            "started_s": values.get(STARTED),
            "pid": info.get("pid"),
            "host": info.get("host"),
            "restarts": member.starts - 1,
            "rate": rate(counted),
            "unit": unit,
            "cpu": None if (cpu := rate(CPU)) is None else round(cpu, 2),
            "memory_bytes": _rounded(values.get(MEMORY)),
            "gpu": min(1.0, busy) if lease.kind in COMPUTE and (busy := rate(GPU_BUSY)) is not None else None,
            "gpu_memory_bytes": _rounded(values.get(GPU_MEMORY)),
            "gpu_capacity_bytes": values.get(GPU_CAPACITY),
            "paths": _shares(paths_before, paths),
            "experts": _experts(snapshots.get(key)),
        }


def _progress(state: str, info: Mapping[str, Any]) -> tuple[Any, Any]:
    """What an actor is getting ready, and the done share of it; graphs go on being captured when it is ready."""
    if state == "ready":
        captured, planned = graphs_of(info) or (0, 0)
        return ("graphs", captured / planned) if captured < planned else (None, None)
    phase = info.get("phase") if state != "gone" else None
    return phase, info.get("progress") if state in ("starting", "loading") else None


def key_of(lease: LeaseInfo) -> str:
    """``kind:name``, as in the state under which its metrics lie."""
    return f"{lease.kind}:{actor_of(lease)}"


def _rounded(num_bytes: float | None) -> float | None:
    """Rounded to a thousandth, because pages need no finer changes."""
    return None if num_bytes is None else float(f"{num_bytes:.3g}")


def _values(snapshot: Mapping[str, Any] | None) -> dict[str, float]:
    """Counters and gauges by name, added up over labels."""
    values: dict[str, float] = {}
    for name, _, data in snapshot["series"] if snapshot is not None else ():
        if "value" in data:
            values[name] = values.get(name, 0.0) + data["value"]
    return values


def _by_label(snapshot: Mapping[str, Any] | None, wanted: str, label: str) -> dict[str, float]:
    """The counters of one name, by what their ``label`` says."""
    series = snapshot["series"] if snapshot is not None else ()
    return {labels[label]: data["value"] for name, labels, data in series if name == wanted}


def _experts(snapshot: Mapping[str, Any] | None) -> list[list[float]]:
    """Of each layer with experts: its index, the load of the busiest over the mean, and how many got no token."""
    load, unused = (_by_label(snapshot, name, "layer") for name in (EXPERT_LOAD, EXPERTS_UNUSED))
    return [[int(layer), load[layer], unused.get(layer, 0)] for layer in sorted(load, key=int) if load[layer]]


def _shares(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Each label's share of what was counted meanwhile, the largest first; empty if that was nothing."""
    counted = {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}
    total = sum(counted.values())
    return {key: round(count / total, 3) for key, count in sorted(counted.items(), key=lambda each: -each[1]) if count}


async def stream_lengths(bus: Bus, names: Names, leases: Sequence[LeaseInfo], address: str) -> list[dict[str, Any]]:
    """Lengths of all streams: the entries that readers have not passed or trimmed yet, and any dead letters."""
    shared = ("jobs", "requests", "tokenized", "control", "journal")
    streams = [(name, str(getattr(names, name))) for name in shared]
    for lease in leases:
        if lease.kind == "executor":
            streams += [(f"steps:{lease.name}", names.steps(lease.name))]
            streams += [(f"results:{lease.name}", names.results(lease.name))]
        elif lease.kind == "detokenizer":
            streams.append((f"sequences:{lease.name}", names.sequences(lease.name)))
    streams.append((f"replies:{address}", names.replies(address)))
    dead = {f"dead:{stage}": names.dead_letters(stage) for stage in KINDS}
    streams += dead.items()
    lengths = await asyncio.gather(*(bus.length(stream) for _, stream in streams))
    rows = zip((name for name, _ in streams), lengths, strict=True)
    return [{"name": name, "length": length} for name, length in rows if length or name not in dead]


def hold_of(leases: Sequence[LeaseInfo]) -> str:
    """The mode in which an operator holds the work, as the scheduler's lease has it; "": nobody does."""
    told = [lease.info.get("held") for lease in leases if lease.kind == "scheduler"]
    return next((mode for mode in told if isinstance(mode, str)), "")
