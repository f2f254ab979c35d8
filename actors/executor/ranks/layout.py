"""Which ranks exchange what with which: those of one stage sums, those of neighbouring stages messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from pagebus.actors.executor.device.comm import ONE_RANK, Comm
from pagebus.actors.executor.ranks.gloo import DISTRIBUTED, GlooComm
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.actors.executor.ranks.staged_comm import StagedComm
from pagebus.actors.model.shards.stages import place_of
from pagebus.actors.settings import Settings


def comm_of(
    settings: Settings, open_store: Callable[[], Any], hostname: str, generation: int, timeout_s: float,
    over: Callable[[GlooComm], Comm] = lambda host: host,
) -> Comm:  # fmt: skip
    """The exchange of the rank of these settings with the others, which meet at the store that ``open_store`` opens.
    ``over``: what the ranks of a stage, or of a model without stages, exchange tensors over beside their hosts. The
    others as in :class:`GlooComm` and :class:`Ring`."""
    rank, size, stages = settings.rank, settings.tensor_parallel_size, settings.pipeline_parallel_size
    if stages == 1:
        return over(GlooComm(rank, size, open_store, hostname, timeout_s))
    world, store = size * stages, cache(open_store)
    stage, within = place_of(rank, size, stages)

    def named(name: str) -> Any:
        return DISTRIBUTED.PrefixStore(name, store())

    everyone = GlooComm(rank, world, lambda: named("world"), hostname, timeout_s)
    host = GlooComm(within, size, lambda: named(f"stage{stage}"), hostname, timeout_s)
    own = over(host) if size > 1 else ONE_RANK
    before, behind = (rank + size) % world, (rank - size) % world  # ranks are numbered from the last stage on
    return StagedComm(everyone, own, Ring(rank, before, behind, hostname, generation, timeout_s))
