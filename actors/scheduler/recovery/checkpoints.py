"""Writes the journal and its checkpoints, so that it is never longer than a successor needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.recovery.journal import checkpoint
from pagebus.actors.scheduler.service.membership import Membership
from pagebus.actors.scheduler.service.trimming import AGAIN_ROUNDS
from pagebus.bus.contract import START, Bus, EntryId
from pagebus.bus.messages import RequestBlamed, RequestMoved, SequencesNamed
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names


class Checkpoints:
    """Appends to the journal, and sums it up in checkpoints.

    Args:
        end: the last entry that a predecessor has left.
        covered: positions in the results of each replica before which no successor needs to read.
    """

    def __init__(self, bus: Bus, names: Names, outbox: Outbox, *, end: EntryId, covered: Mapping[str, EntryId]) -> None:
        self.covered = dict(covered)
        self._bus = bus
        self._journal = names.journal
        self._outbox = outbox
        self._end = end
        """The last journal entry."""
        self._dropped = START
        self._rounds = 0

    def bus_restarted(self) -> None:
        """Forget what was dropped: it may be back."""
        self._end = max(self._end, EntryId(self._outbox.epoch))
        self._dropped = START

    def append(self, message: SequencesNamed | RequestMoved | RequestBlamed) -> None:
        """Append an entry after the last checkpoint."""
        self._end = self._outbox.append(self._journal, message)

    async def sum_up(
        self,
        core: Core,
        positions: Mapping[str, EntryId],
        membership: Membership,
        blamed: Iterable[RequestBlamed],
    ) -> None:
        """Write a checkpoint if results up to ``positions`` are not covered by one, and trim what it replaces. Without
        live requests everything is trimmed. Every :data:`AGAIN_ROUNDS` rounds, trim again."""
        self._rounds += 1
        if self._rounds % AGAIN_ROUNDS == 0:
            self.bus_restarted()
        positions, forgettable = dict(positions), core.is_forgettable
        if positions == self.covered and not (forgettable and self._end > self._dropped):
            return
        if forgettable:
            superfluous = self._end
        else:
            epochs = {name: member.epoch for name, member in membership.members.items()}
            there = {"ingresses": membership.ingresses, "detokenizers": membership.live_detokenizers}
            summary = checkpoint(core, positions, epochs, **there, blamed=blamed)
            self._end = self._outbox.append(self._journal, summary)
            superfluous = EntryId(self._end.epoch, self._end.index - 1)
        await self._outbox.stored(self._outbox.queued)
        await self._bus.trim(self._journal, superfluous)
        self._dropped = superfluous
        self.covered = positions
