"""The contract of the bus. ``RedisBus`` and ``MemoryBus`` both implement it and pass the same tests.

Three kinds of stream (see :mod:`pagebus.bus.streams`):

* **Work** streams have consumer groups. An entry is delivered to one consumer of the group, stays pending until it is
  acked, and is deleted by the ack. A consumer first gets back what it left pending (after a restart), then new entries;
  what a dead consumer left is taken over by :meth:`Bus.claim`. Delivery is at least once: handlers are idempotent by
  request id.
* **Log** streams have one writer, which names each entry ``<epoch>-<index>``. A repeat is recognised as the writer's
  own and succeeds; an entry of a replaced writer (lower epoch) raises :class:`Fenced`. Readers remember their position.
* **Mailboxes** have many writers and one reader, which remembers its position and trims what it has passed. One for
  replies to an actor is there only while that actor keeps it: what is sent to the dead is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # supervisors do without messages, and so without numpy
    from pagebus.bus.messages import JsonValue, Message


@dataclass(frozen=True, slots=True, order=True)
class EntryId:
    """Position in a stream. In log streams ``epoch`` and ``index`` are the writer's, elsewhere Redis's own."""

    epoch: int = 0
    index: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}-{self.index}"

    @classmethod
    def parse(cls, text: str | bytes) -> EntryId:
        epoch, _, index = (text.decode() if isinstance(text, bytes) else text).partition("-")
        return cls(int(epoch), int(index or 0))


Counts = Mapping[str, Mapping[str, int]]
"""Increments of counters: key -> counter -> increment."""
COUNTERS_KEPT_S = 30 * 86400
"""How long counters of jobs are kept after the last change."""
START = EntryId(0, 0)
FENCE_INDEX = 2**62
"""Index of a fence entry: beyond everything a writer of that epoch could write, so its late writes are refused."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message read from ``stream``. ``deliveries`` counts how often a work entry has been handed out (from 1).

    An entry whose frame cannot be decoded has ``message`` None and the reason in ``error``; the reader dead-letters it.
    """

    stream: str
    id: EntryId
    message: Message | None
    deliveries: int = 1
    error: str = ""
    raw: Mapping[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a work entry: ``message`` is added to ``stream`` and, unless ``counter`` is "", that counter
    under the key ``counters`` grows by one. Counters are kept for COUNTERS_KEPT_S from then on."""

    entry: Entry
    stream: str
    message: Message
    counters: str = ""
    counter: str = ""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A live actor: its ``kind`` and ``name``, the epoch of its lease, and the ``info`` it publishes."""

    kind: str
    name: str
    epoch: int
    info: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry to append to a log stream."""

    stream: str
    id: EntryId
    message: Message


class BusError(Exception):
    """Base of all errors that the bus raises deliberately. The text gives cause and remedy."""


class BusUnavailable(BusError):
    """The server cannot be reached or refuses writes for now. The operation may or may not have been applied."""


class BusRefused(BusUnavailable):
    """The server answers and refuses writes for now: out of memory, disk full, no master. The text has no address."""


class Fenced(BusError):
    """A newer writer owns this log stream, or a newer holder this lease: stop at once and write nothing more."""


class ServerRolledBack(BusError):
    """The server was restarted and has lost entries that it had confirmed."""


class LeaseTaken(BusError):
    """Another live actor holds this lease."""


class CodecError(BusError):
    """A frame that is not of Pagebus, of an unknown version, or with invalid fields."""


class Bus(ABC):
    """The contract. All methods may raise :class:`BusUnavailable`; reads may be repeated freely, writes are idempotent
    where the docstring says so. Only one read of each kind may be under way per bus object and stream set."""

    def __init__(self) -> None:
        self.on_restart: Callable[[], None] = lambda: None
        """Called when a connection finds that the server was restarted or replaced. The last writes may be missing
        there."""
        self.advice = ""
        """What the operator should change about the server; known once it is connected."""

    def tell_restarts(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called at restarts."""
        self.on_restart = tell

    # -- life ---------------------------------------------------------------------------------------------------------
    @abstractmethod
    async def connect(self) -> None:
        """Open the connection, retrying with backoff until it answers or the connect timeout (s) passes."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections; pending reads end. Idempotent."""

    @abstractmethod
    async def ping(self) -> float:
        """Round trip in seconds."""

    # -- work streams and mailboxes -----------------------------------------------------------------------------------
    @abstractmethod
    async def publish(self, items: Iterable[tuple[str, Message]]) -> None:
        """Add messages, in order, to work streams or mailboxes, in one round trip. A repeat adds duplicates. Messages
        to an actor's mailbox (:meth:`Names.is_kept`) that does not exist are dropped."""

    @abstractmethod
    async def open_mailbox(self, stream: str, *, ttl_s: int) -> EntryId:
        """Create an actor's mailbox for ``ttl_s`` seconds, emptying an existing one. Returns the position to read it
        from."""

    @abstractmethod
    async def keep_mailbox(self, stream: str, *, ttl_s: int) -> bool:
        """Extend the life of a mailbox by ``ttl_s`` seconds. False: it no longer exists."""

    @abstractmethod
    async def create_group(self, stream: str, group: str) -> None:
        """Create the stream and its group, reading from the start. Idempotent."""

    @abstractmethod
    async def read_group(
        self, group: str, consumer: str, streams: Sequence[str], *, count: int = 128, block_ms: int = 1000
    ) -> list[Entry]:
        """Entries for this consumer: on its first call the ones it left pending, then new ones. An entry that it has
        let go of is returned again if it is pending for this consumer again.

        Waits at most ``block_ms`` for the first entry (0 returns at once). Re-creates a group that was lost.
        """

    @abstractmethod
    async def ack(self, group: str, entries: Iterable[Entry]) -> None:
        """Acknowledge and delete entries whose effect is stored, in one round trip. Idempotent."""

    @abstractmethod
    async def complete(self, group: str, completions: Sequence[Completion]) -> list[str]:
        """Add the message of each completion and acknowledge its entry, in one transaction. An entry that is no longer
        pending has been completed, by an earlier call or by another consumer. It is not completed again, even by
        repeats and by concurrent calls.

        Returns for each why its stream refuses the message, in which case nothing has happened; "" if it was added. A
        key of counters with a value of another type is left alone.
        """

    @abstractmethod
    async def claim(self, stream: str, group: str, consumer: str, dead_consumer: str) -> list[Entry]:
        """Take over everything ``dead_consumer`` (whose lease has expired) left pending, and remove that consumer."""

    @abstractmethod
    async def consumers(self, stream: str, group: str) -> dict[str, int]:
        """Consumers of a group and how many entries each has pending."""

    @abstractmethod
    async def holders(self, stream: str, group: str, ids: Sequence[EntryId]) -> dict[EntryId, str]:
        """Which consumer has each of these entries pending; those that are pending nowhere are left out."""

    @abstractmethod
    def let_go(self, stream: str, group: str, ids: Iterable[EntryId]) -> None:
        """Note that this consumer has stopped work on entries that another consumer has taken over. A server that has
        lost data may give them back."""

    # -- log streams --------------------------------------------------------------------------------------------------
    @abstractmethod
    async def append(self, entries: Sequence[LogEntry]) -> None:
        """Append to log streams, in order, in one round trip. Repeating one's own entry is a success.

        Raises:
            Fenced: the stream already holds an entry of a higher epoch, or a fence (FENCE_INDEX) of the writer's epoch.
        """

    @abstractmethod
    async def read(self, positions: Mapping[str, EntryId], *, count: int = 256, block_ms: int = 1000) -> list[Entry]:
        """Entries after the given positions of log streams or mailboxes, atomically over all streams, streams in the
        order of ``positions``, at most ``count`` per stream. Waits at most ``block_ms`` for the first."""

    @abstractmethod
    async def last_id(self, stream: str) -> EntryId:
        """Id of the newest entry ever added (START if the stream does not exist)."""

    @abstractmethod
    async def trim(self, stream: str, through: EntryId) -> int:
        """Delete entries up to and including ``through``; returns how many."""

    @abstractmethod
    async def remove(self, stream: str, ids: Iterable[EntryId]) -> int:
        """Delete these entries of a stream without a consumer group; returns how many there were."""

    @abstractmethod
    async def length(self, stream: str) -> int:
        """Entries now in the stream."""

    @abstractmethod
    async def delete(self, *streams: str) -> None:
        """Delete whole streams, or counters."""

    @abstractmethod
    async def dead_letter(self, stage: str, entry: Entry, reason: str) -> None:
        """Store a message that cannot be processed, with the reason, in the stage's dead-letter stream (bounded)."""

    # -- small durable state ------------------------------------------------------------------------------------------
    @abstractmethod
    async def put_state(self, name: str, value: Mapping[str, JsonValue], *, ttl_s: float | None = None) -> None:
        """Store a small JSON object under a name, for ``ttl_s`` seconds (None: for ever)."""

    @abstractmethod
    async def get_state(self, *names: str) -> list[Mapping[str, JsonValue] | None]:
        """The objects under these names, None where there is none, in one round trip."""

    @abstractmethod
    async def count(self, counts: Counts, *, ttl_s: int) -> None:
        """Add to counters, which are kept for ``ttl_s`` seconds from then on. A repeat adds again."""

    @abstractmethod
    async def counters(self, *keys: str) -> list[dict[str, int]]:
        """The counters under these keys by name; empty where there are none, or a value of another type."""

    @abstractmethod
    async def delete_state(self, *names: str) -> None:
        """Remove state. Idempotent."""

    @abstractmethod
    async def put_row(self, table: str, row: str, value: Mapping[str, JsonValue], *, replace: bool = True) -> bool:
        """Store a small JSON object as a row of a table, whatever others do to its other rows meanwhile. Without
        ``replace`` an existing row stays. Returns whether the row is new."""

    @abstractmethod
    async def get_rows(self, table: str) -> dict[str, Mapping[str, JsonValue]]:
        """All rows of a table by name; empty if there is none."""

    @abstractmethod
    async def delete_row(self, table: str, row: str) -> bool:
        """Remove a row of a table; returns whether it was there."""

    # -- leases -------------------------------------------------------------------------------------------------------
    @abstractmethod
    async def acquire_lease(self, kind: str, name: str, info: Mapping[str, JsonValue], *, ttl_s: float) -> int:
        """Acquire the lease (kind, name) for ``ttl_s`` seconds; returns a new epoch, larger than all before it.

        Raises:
            LeaseTaken: somebody else holds it and it has not expired.
        """

    @abstractmethod
    async def renew_lease(
        self, kind: str, name: str, epoch: int, info: Mapping[str, JsonValue], *, ttl_s: float
    ) -> bool:
        """Extend the caller's lease and replace its info. An expired lease without a new holder is taken back under the
        same epoch. So is a lease to which a restarted server assigns an earlier epoch. Returns whether the lease was
        still the caller's.

        Raises:
            Fenced: the lease belongs to a later epoch now.
        """

    @abstractmethod
    async def release_lease(self, kind: str, name: str, epoch: int) -> None:
        """Release a lease; without effect if the caller no longer holds it."""

    @abstractmethod
    async def revoke_lease(self, kind: str, name: str, *, below: int = 0) -> int:
        """Shut out all former holders of a lease that has no holder, or only one below the epoch ``below``: none of
        them can take it back (:meth:`renew_lease` raises Fenced). Returns the epoch below which all are shut out; 0,
        without any effect, if the lease is held."""

    @abstractmethod
    async def leases(self, kind: str | None = None) -> list[LeaseInfo]:
        """Live leases (of one kind), ordered by kind and name."""


def fence_reason(entry: LogEntry, last: EntryId) -> str:
    """Why a refused entry is not a repeat by its own writer ("" if it is one); ``last`` is the stream's newest id.

    A fence that finds a newer writer is no failure: the old writer is shut out, which is all a fence is for.
    """
    if entry.id.index >= FENCE_INDEX:
        return ""
    if last.epoch > entry.id.epoch:
        return f"{entry.stream}: epoch {entry.id.epoch} was replaced by epoch {last.epoch}; {entry.id} is not written"
    if last.index >= FENCE_INDEX:
        return f"{entry.stream}: epoch {entry.id.epoch} was fenced; {entry.id} is not written"
    return ""
