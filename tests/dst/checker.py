"""What must hold when the faults are over and all clients have their answers: nothing is left but empty streams."""

from __future__ import annotations

import asyncio

from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.jobs.actor import JobsActor
from tests.dst.world import World

KEPT_STATES = ("metrics:", "history:", "streams", "standby:")


def leftovers(world: World) -> list[str]:
    """Everything that somebody still holds."""
    server, names = world.server, world.names
    found = [f"{name} has {len(stream.ids)} entries" for name, stream in server.streams.items() if stream.ids]
    for name, stream in server.streams.items():
        found += [
            f"{name}: {group} has {len(each.pending)} pending" for group, each in stream.groups.items() if each.pending
        ]
    kept = tuple(names.state(prefix) for prefix in KEPT_STATES)
    found += [f"state {name}" for name in list(server.states) if server.live_state(name) and not name.startswith(kept)]
    if world.links is not None:
        found += [f"pull {each.number} of {each.target} is under way" for each in world.links.orders]
    for life in world.living:
        if isinstance(life.actor, SchedulerActor) and life.actor.state == "ready":
            found += _of_scheduler(life.actor)
        if isinstance(life.actor, JobsActor) and life.actor.window.jobs:
            found.append(f"{life.name} has {life.actor.window.jobs} jobs")
        parts = life.actor.parts if isinstance(life.actor, JobsActor) and life.actor.state == "ready" else None
        inbox = parts.inbox if parts is not None else getattr(getattr(life.actor, "context", None), "inbox", None)
        if isinstance(inbox, Inbox) and inbox.num_open:
            found.append(f"{life.name} has {inbox.num_open} open requests")
        outbox = parts.outbox if parts is not None else getattr(life.actor, "_outbox", None)
        if outbox is not None and outbox.depth:
            found.append(f"{life.name} has {outbox.depth} messages to send")
        sequences = getattr(life.actor, "_sequences", None)
        if sequences is not None and len(sequences):
            found.append(f"{life.name} has {len(sequences)} sequences")
    return found


def _of_scheduler(scheduler: SchedulerActor) -> list[str]:
    assert scheduler._leader is not None
    core, work = scheduler.core, scheduler._leader.work
    core.check_integrity()
    counts = {
        "requests": len(core.requests),
        "finished requests": len(core.delivery.finished),
        "waiting sequences": len(core.waiting),
        "slots": core.num_running,
        "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in core.replicas.values()),
        "steps in flight": sum(len(replica.in_flight) for replica in core.replicas.values()),
        "pulls": len(core.planner.pulls),
        "entries": len(work.requests),
        "settled entries": work.has_settled,
    }
    return [f"the scheduler has {count} {name}" for name, count in counts.items() if count]


async def until_clean(world: World, limit_s: float) -> None:
    """Wait until nothing is left over; what is after ``limit_s``, is a problem."""
    until_s = world.loop.time() + limit_s
    while left := leftovers(world):
        if world.loop.time() > until_s:
            world.problems += [f"left over: {each}" for each in left]
            return
        await asyncio.sleep(0.5)
    world.problems += [f"dead letter in {name}" for name in world.server.streams if ":dead:" in name]
