"""The disk tier of one replica, below its host tier: what is written to files, and what is read back.

A read fills host blocks. Once the executor has confirmed them, they are found like any other cached blocks of the host
tier. The sequence that wants them waits in the queue, without a slot. So no step ever waits for a disk, and a block
that could not be read is never in a block table. The sequence waits once: what cannot be read is computed.

Blocks of prompts are written when they have been computed or found again, and blocks that the device tier evicts. A
block is copied to the host first if it is not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Run

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.scheduler.kv.disk_pool import DiskPool, name_of
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex
from pagebus.actors.scheduler.kv.prompt_rate import PromptRate
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.replica.host_tier import HostTier
from pagebus.actors.scheduler.replica.plan_builder import PlanBuilder
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import DISK_FORGET, DISK_TELL, DiskReport

SHARE = 0.5
"""The share of the host blocks that reads and writes may hold."""
MOST_WRITES = 256
"""The most blocks that are being written at a time."""
MOST_CANDIDATES = 2**14
MOST_TAKEN = 4096
"""The applied reports that are remembered: more than an executor repeats."""
PATIENCE_S = 10.0
"""A disk with reads under way and no report for this long hangs: sequences stop waiting for it and are computed."""


class DiskTier:
    """``num_in``, ``num_out``, ``num_not_read`` and ``num_not_written`` count blocks; ``num_queries`` and ``num_hits``
    tokens beyond both other tiers, looked up and found."""

    def __init__(
        self, joined: ReplicaJoined, host: HostTier, index: PrefixIndex, builder: PlanBuilder, prompts: PromptRate
    ) -> None:
        self.pool = DiskPool(joined.num_disk_blocks)
        self.num_in = self.num_out = self.num_not_read = self.num_not_written = self.num_queries = self.num_hits = 0
        self._host, self._index, self._builder = host, index, builder
        self._page_tokens = joined.block_size / (1 + joined.windowed_pages)
        self.rate = ReadRate(joined.block_bytes, prompts)
        self._compares = joined.prefill_tokens_per_s > 0
        """Whether reading can be compared with computing."""
        self._reads: dict[bytes, int] = {}
        self._writes: dict[bytes, int] = {}
        """Host blocks of reads and writes under way, by content."""
        self._void: set[bytes] = set()
        """Contents under way that are not wanted any more."""
        self._late: set[bytes] = set()
        """Contents whose reads no sequence waits for any more."""
        self._quiet_since_s: float | None = None
        self._taken: dict[int, None] = {}
        """Numbers of applied reports, the oldest first."""
        self._is_told = False
        """Whether the contents of the disk are known; nothing is read or written before."""
        self._candidates: deque[tuple[bytes, int]] = deque(maxlen=MOST_CANDIDATES)
        """Contents that are worth a write, with the device blocks that had them."""
        if self.is_on:
            builder.disk.ask(DISK_TELL)
            host.tell_demotions(self._write)

    @property
    def is_on(self) -> bool:
        """Whether the replica has a disk tier."""
        return self.pool.num_blocks > 0

    @property
    def is_urgent(self) -> bool:
        """Whether a sequence or the scheduler waits for the next plan's disk orders."""
        return bool(self._builder.disk.command or self._builder.disk.read)

    @property
    def has_news(self) -> bool:
        """Whether an idle replica gets a plan for the disk alone."""
        if self._builder.disk:
            return True
        return self.is_on and bool(self._candidates) and self._room(MOST_WRITES, self._writes) > 0

    # -- reads --------------------------------------------------------------------------------------------------------
    def has(self, content: bytes) -> bool:
        """Whether a content can be read."""
        return content in self.pool.stored

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to read this many blocks, after those being read, instead of computing this many tokens."""
        if self._late:
            return False
        cost = self.rate.tokens(num_blocks + len(self._reads))
        if cost is None or self.rate.pays(cost + self._host.cost_tokens(num_blocks), num_tokens):
            return True
        self.rate.declined(num_tokens)
        return False

    def cost_tokens(self, num_blocks: int) -> int:
        """Cost of reading, in tokens that could be computed meanwhile; at most the tokens read."""
        cost = self.rate.tokens(num_blocks)
        return self._host.cost_tokens(num_blocks) if cost is None else int(min(num_blocks * self._page_tokens, cost))

    def read(self, sequence: Sequence, contents: Run[bytes], kept: Iterable[int], num_tokens: int) -> None:
        """Have contents read for a waiting sequence, which lengthen its prefix by ``num_tokens``; as many as there is
        room for. The sequence will also load the host blocks ``kept``, which are marked as used."""
        sequence.wait_for_disk(contents)
        self.rate.began()
        self.num_queries += num_tokens
        for block in kept:
            self._host.pool.touch(block)
        wanted = [each for each in contents if each not in self._reads and each in self.pool.stored]
        count = min(len(wanted), self._room(self._host.pool.num_blocks, self._reads))
        for content, host in zip(wanted, self._host.pool.allocate(count), strict=False):
            self.pool.touch(content)
            self._reads[content] = self._builder.disk.read[content] = host

    def is_reading(self, sequence: Sequence) -> bool:
        """Whether a read for the sequence is still expected."""
        return any(each in self._reads and each not in self._late for each in sequence.disk_reads or ())

    @property
    def is_awaited(self) -> bool:
        """Whether a sequence may be waiting for a read."""
        return len(self._reads) > len(self._late)

    def gives_up(self, now_s: float) -> bool:
        """Whether the disk hangs. If so, no sequence waits for its reads any more; their host blocks stay held."""
        if not self.is_awaited:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > PATIENCE_S:
            self._late |= self._reads.keys()
            return True
        return False

    # -- writes -------------------------------------------------------------------------------------------------------
    def offer(self, contents: Iterable[bytes], blocks: Iterable[int]) -> None:
        """Note device blocks with contents that are worth a write."""
        if self.is_on:
            self._candidates += [each for each in zip(contents, blocks, strict=False) if each[0] not in self.pool]

    def finish_plan(self) -> None:
        """Add writes to the plan."""
        if not self.is_on:
            return
        for _ in range(min(len(self._candidates), self._room(MOST_WRITES, self._writes))):
            content, block = self._candidates.popleft()
            if content in self.pool:
                continue
            host = self._host.pool.index.find(content)
            if host is None and self._index.find(content) == block:
                host = self._host.stage(block, content)
            if host is not None:
                self._write(content, host)

    def _write(self, content: bytes, host: int) -> None:
        """Write a host block with this content, which the same plan may copy there."""
        if content in self.pool or not self._room(MOST_WRITES, self._writes) or not self._worth():
            return
        dropped = self.pool.begin(content, self._reads)
        if dropped is None:
            return
        self._host.pool.retain((host,))
        self._builder.disk.drop(dropped)
        self._writes[content] = self._builder.disk.written[content] = host

    def _worth(self) -> bool:
        """Whether reading a block is faster than computing it, as far as is known."""
        return self.cost_tokens(1) < self._page_tokens or not self._compares

    def _room(self, most: int, under_way: dict[bytes, int]) -> int:
        pool = self._host.pool
        if not self._is_told:
            return 0
        left = min(most, int(SHARE * pool.num_blocks)) - len(under_way)
        return max(0, min(left, pool.num_free))

    # -- reports ------------------------------------------------------------------------------------------------------
    def take(self, report: DiskReport) -> None:
        """Apply a report of this replica's executor, unless it is a repeat: its contents may be under way again."""
        if report.number in self._taken:
            return
        if report.number:
            self._taken[report.number] = None
            if len(self._taken) > MOST_TAKEN:
                del self._taken[next(iter(self._taken))]
        self._is_told = True
        self._quiet_since_s = None
        self._builder.disk.drop(self.pool.found(map(bytes.fromhex, report.found)))
        for done, names in ((True, report.read), (False, report.not_read)):
            for name in names:
                self._end_read(bytes.fromhex(name), done)
        for done, names in ((True, report.written), (False, report.not_written)):
            for name in names:
                self._end_write(bytes.fromhex(name), done)
        self.rate.learn(report.bytes_per_s)

    def _end_read(self, content: bytes, done: bool) -> None:
        host = self._reads.pop(content, None)
        if host is None:
            return
        self._late.discard(content)
        self.num_in += done
        self.num_not_read += not done
        if done and content not in self._void and self._host.pool.index.insert(content, host, step=0):
            self.num_hits += int(self._page_tokens)
            self._index.new_anchors.append(content)  # it may be an anchor, by which the replica is found
        if not done:
            self.pool.forget(content)
        self._void.discard(content)
        self._host.pool.release((host,))

    def _end_write(self, content: bytes, done: bool) -> None:
        host = self._writes.pop(content, None)
        if host is None:
            return
        self.num_out += done
        self.num_not_written += not done
        self.pool.end(content, stored=done)
        if content in self._void:
            self._void.discard(content)
            self._drop(content)
        self._host.pool.release((host,))
        if self._index.find(content) is not None:
            self._host.pool.expend(host)

    def _drop(self, content: bytes) -> None:
        self.pool.forget(content)
        self._builder.disk.dropped.append(name_of(content))

    def forget(self) -> None:
        """Have everything deleted."""
        if self.is_on:
            self.pool.clear()
            self._candidates.clear()
            self._is_told = True
            self._void |= self._reads.keys() | self._writes.keys()
            self._builder.disk.ask(DISK_FORGET)

    # -- checks -------------------------------------------------------------------------------------------------------
    @property
    def owned(self) -> list[int]:
        """The host blocks that it holds."""
        return [*self._reads.values(), *self._writes.values()]

    def check_integrity(self) -> None:
        """Reads and writes under way agree with the pool.

        Raises:
            AssertionError: they do not.
        """
        self.pool.check_integrity()
        assert self._void <= self._reads.keys() | self._writes.keys()
        assert self._late <= self._reads.keys()
        assert all(content in self.pool for content in self._writes), "a block is written that is not expected"
