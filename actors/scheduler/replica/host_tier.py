"""The host tier of one replica: preemption by swap, demotion of cached blocks, and loads back to the device.

A plan's swap-outs come first, in order, then its swap-ins, then its pass (:class:`pagebus.bus.messages.StepPlan`). So a
swap-out may name a device block that the same plan gives away, and a later plan may write a host block that this one
reads. Blocks of copies that no plan carries yet must not change. The host blocks of a load are therefore retained until
the plan with the load has been built, and only then are its device blocks listed in the prefix index.

Loads overlap steps. A sequence whose blocks are being loaded is left out of steps that others can fill, until a result
confirms its copies. The order of plans is correct in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.scheduler.held_blocks import Swapped
from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.host_pool import HostPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex, adapter_of, page_keys
from pagebus.actors.scheduler.kv.prompt_rate import PromptRate
from pagebus.actors.scheduler.replica.plan_builder import PlanBuilder
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import Int32Array

MAX_DEMOTIONS = 512
"""Most cached blocks that one plan copies out: as many as a prompt chunk of 8192 tokens needs."""


@dataclass(slots=True)
class Load:
    """Blocks of a bound sequence to load to the device: ``hosts[i]`` into its page ``pages[i]``. Those of its
    ``blocks`` begin with block ``first``. ``step``: the plan that carries the load, or 0."""

    sequence: Sequence
    pages: list[int]
    hosts: list[int]
    first: int
    step: int = 0


class HostTier:
    """The host tier of one replica, below the device tier's ``blocks`` and ``index``. ``prompts``: how fast the replica
    computes what need not be copied. ``num_out`` and ``num_in`` count blocks; ``num_queries`` and ``num_hits`` count
    tokens of prefixes looked up and found."""

    def __init__(
        self, joined: ReplicaJoined, blocks: BlockPool, index: PrefixIndex, builder: PlanBuilder, prompts: PromptRate,
        mode: str,
    ) -> None:  # fmt: skip
        self.pool = HostPool(joined.num_host_blocks)
        self.copied_step = 0
        self._on_demoted: Callable[[bytes, int], None] | None = None
        self._is_elsewhere: Callable[[bytes], bool] | None = None
        self.num_out = self.num_in = self.num_queries = self.num_hits = 0
        self._blocks = blocks
        self._index = index
        self._builder = builder
        self._replica = joined.replica
        self._mode = mode
        self._block_size = joined.block_size
        self._windowed_pages = joined.windowed_pages
        self._page_tokens = joined.block_size / (1 + joined.windowed_pages)
        self._page_s = joined.block_bytes / joined.copy_bytes_per_s if joined.copy_bytes_per_s > 0 else 0.0
        self._prompts = prompts
        self._loads: dict[int, Load] = {}
        self._swapped: dict[int, Sequence] = {}
        self._demotions_left = MAX_DEMOTIONS
        self._seen_allocated = 0
        self._last_load = 0
        """The newest plan that loads something."""
        self.is_asked = False
        """Whether a pull waits for the executor to report its finished copies."""
        self._update_demotion()

    def tell_demotions(self, tell: Callable[[bytes, int], None]) -> None:
        """Call ``tell`` with a content and its host block when the device tier evicts it."""
        self._on_demoted = tell

    def let_go_first(self, is_elsewhere: Callable[[bytes], bool] | None) -> None:
        """Drop contents first that a neighbour's host tier also keeps, as ``is_elsewhere`` says. It then counts as used
        there."""
        self._is_elsewhere = is_elsewhere

    def copied(self, step: int) -> None:
        """The executor's copies up to this step are done."""
        self.copied_step = max(self.copied_step, step)

    @property
    def _block_tokens(self) -> float | None:
        """Cost of copying one page, in tokens that could be computed meanwhile; None if not measured."""
        return self._page_s * self._prompts.tokens_per_s or None

    def _pays(self, num_copies: int, num_tokens: int) -> bool:
        """Whether copying this many blocks costs less than computing this many tokens."""
        if self._mode != "auto" or self._block_tokens is None:
            return self._mode == "swap"
        return num_copies * self._block_tokens < num_tokens

    def grow(self, num_host_blocks: int) -> None:
        """Set the number of host blocks that the executor has ready."""
        self.pool.grow(num_host_blocks)
        self._update_demotion()

    def _update_demotion(self) -> None:
        """Demote cached blocks only if copying them out and in is faster than recomputing them."""
        each = self._block_tokens
        pays = self._mode == "swap" or (each is not None and 2 * each < self._page_tokens)
        self._blocks.tell_evictions(self._demote if pays and self.pool.num_blocks else None)

    # -- preemption ---------------------------------------------------------------------------------------------------
    def swap_out(self, sequence: Sequence, num_computed: int, num_listed: int) -> bool:
        """Copy the first ``num_computed`` tokens of a sequence that loses its device blocks to the host. ``num_listed``
        blocks are full and hashed. False if that does not pay or there is no room."""
        pages, keys = self._held_pages(sequence, -(-num_computed // self._block_size), num_listed)
        hosts = [None if key is None else self.pool.index.find(key) for key in keys]
        num_new = hosts.count(None)
        if not self._pays(num_new + len(pages), num_computed):
            return False
        shared = [host for host in hosts if host is not None]
        self.pool.retain(shared)
        if num_new > self.pool.num_free:
            self.pool.release(reversed(shared))
            return False
        fresh = self.pool.allocate(num_new)
        # The last blocks first: they are reallocated in this order, so the next owners need not wait for all copies.
        for i in reversed(range(len(pages))):
            if hosts[i] is None:
                hosts[i] = host = fresh.pop()
                self._copy_out(pages[i], host)
                if (key := keys[i]) is not None:
                    self.pool.index.insert(key, host)
        self._index.note_anchors(sequence.hashes, sequence.first_block, min(num_listed, len(sequence.hashes)))
        held = [host for host in hosts if host is not None]
        count = -(-num_computed // self._block_size) - sequence.first_block
        first, first_windowed = sequence.first_block, sequence.first_windowed
        sequence.swap(Swapped(self._replica, held[:count], num_computed, first, held[count:], first_windowed))
        self._swapped[sequence.id] = sequence
        return True

    def cost_of_return(self, sequence: Sequence, num_computed: int, num_listed: int) -> float:
        """Tokens that could be computed until a sequence that loses its device blocks has these tokens again:
        by :meth:`swap_out`, or by computing them. 0 if ``--preemption-mode`` leaves no choice."""
        if self._mode != "auto":
            return 0.0
        if self._block_tokens is None or not self.pool.num_blocks:
            return num_computed
        pages, keys = self._held_pages(sequence, -(-num_computed // self._block_size), num_listed)
        num_new = sum(key is None or self.pool.index.find(key) is None for key in keys)
        if num_new > self.pool.num_free:
            return num_computed
        return min(num_computed, (num_new + len(pages)) * self._block_tokens)

    def _held_pages(self, sequence: Sequence, num_blocks: int, num_listed: int) -> tuple[list[int], list[bytes | None]]:
        """The pages of a sequence's first ``num_blocks`` blocks that it holds, and what each of them is listed
        under: those of ``num_listed`` blocks."""
        first, each, hashes = sequence.first_block, self._windowed_pages, sequence.hashes[:num_listed]
        pages = sequence.blocks[: num_blocks - first]
        keys: list[bytes | None] = list(hashes[first:])  # without prefix caching there are none
        keys += [None] * (len(pages) - len(keys))
        if each:
            pages += sequence.windowed[: (num_blocks - sequence.first_windowed) * each]
            for block_hash in hashes[sequence.first_windowed :]:
                keys += page_keys(block_hash, each)
            keys += [None] * (len(pages) - len(keys))
        return pages, keys

    def forget(self, sequence: Sequence) -> None:
        """Release a sequence's host blocks: it is back, over, or continues elsewhere. Listed blocks stay cached. Those
        that a neighbour has, too, go first."""
        swapped = sequence.swapped
        assert swapped is not None
        sequence.swap(None)
        if sequence.state is State.SWAPPED:
            sequence.become(State.WAITING)
        del self._swapped[sequence.id]
        self.pool.release(reversed(swapped.hosts))
        for host in swapped.hosts:
            content = self.pool.index.hash_of(host)
            if content is not None and self._is_kept_elsewhere(content):
                self.pool.expend(host)

    @property
    def swapped(self) -> list[Sequence]:
        """Sequences whose blocks are here until they run again."""
        return list(self._swapped.values())

    def forget_all(self) -> None:
        """Release the host blocks of all swapped sequences; they recompute their tokens elsewhere."""
        for sequence in self.swapped:
            self.forget(sequence)

    # -- cached blocks ------------------------------------------------------------------------------------------------
    def match(self, hashes: list[bytes], start: int, limit: int) -> list[int]:
        """Host blocks that continue the device's cached prefix of ``start`` blocks, up to block ``limit``."""
        if not len(self.pool.index):
            return []
        return self.pool.index.match(hashes[start:limit], limit - start)

    def _demote(self, block: int, block_hash: bytes) -> None:
        """Keep a copy of a listed device block without owner that is, or soon will be, reallocated. Adapters' blocks
        need none, because the executor has the adapter in host memory."""
        if adapter_of(block_hash) is not None:
            return
        host = self.pool.index.find(block_hash)
        if host is not None:
            self.pool.touch(host)
        elif self._is_kept_elsewhere(block_hash) or not self._demotions_left:
            return
        else:
            host = self.stage(block, block_hash)
            self._demotions_left -= host is not None
        if host is not None and self._on_demoted is not None:
            self._on_demoted(block_hash, host)

    def _is_kept_elsewhere(self, content: bytes) -> bool:
        """Whether a neighbour keeps the content. Never so with a disk tier, which writes from a copy here."""
        return self._is_elsewhere is not None and self._on_demoted is None and self._is_elsewhere(content)

    def stage(self, block: int, content: bytes) -> int | None:
        """Copy a listed device block, whose content is not on the host. Returns the host block, None without room."""
        if not self.pool.num_free:
            return None
        (host,) = self.pool.allocate(1)
        self.pool.index.insert(content, host)
        self.pool.release((host,))
        self._copy_out(block, host)
        return host

    def has_loaded(self, step: int) -> bool:
        """Whether the loads of all plans up to this one are done."""
        return self.copied_step >= min(step, self._last_load)

    def ask(self) -> None:
        """Have the next plan's result report the finished copies."""
        self.is_asked = True

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Count tokens of a prefix, beyond those on the device, that were looked up and found."""
        if self.pool.num_blocks:
            self.num_queries += num_tokens
            self.num_hits += num_found

    def finish_plan(self, step: int) -> None:
        """Add this plan's copies, after its blocks have been allocated."""
        self.is_asked = False
        self._update_demotion()
        if self._blocks.on_evict is not None and self._blocks.num_allocated > self._seen_allocated:
            self._look_ahead()
        if self._loads:
            self._send(step)

    def _look_ahead(self) -> None:
        """Demote the blocks that the next step would evict if it takes as many as this one, so that it need not wait
        for copies."""
        taken = self._blocks.num_allocated - self._seen_allocated
        self._seen_allocated = self._blocks.num_allocated
        blocks = self._blocks.head(min(taken, self._demotions_left))
        contents = self._index.hashes_of(blocks)
        for block, content in zip(blocks, contents, strict=True) if any(contents) else ():
            if content is not None:
                self._demote(block, content)
        self._demotions_left = MAX_DEMOTIONS

    def _copy_out(self, block: int, host: int) -> None:
        self._blocks.use_next(block)
        self._builder.swap_out_blocks.append(block)
        self._builder.swap_out_hosts.append(host)
        self.num_out += 1

    # -- the way back -------------------------------------------------------------------------------------------------
    def cost_tokens(self, num_pages: int) -> int:
        """Cost of loading, in tokens that could be computed meanwhile; at most the tokens loaded."""
        each = self._page_tokens if self._block_tokens is None else min(self._block_tokens, self._page_tokens)
        return int(num_pages * each)

    def load(self, sequence: Sequence, pages: list[int], hosts: list[int], first: int) -> None:
        """Load ``pages`` of a sequence in a slot; those of its ``blocks`` begin with block ``first``. The caller has
        retained ``hosts``."""
        self._loads[sequence.slot] = Load(sequence, pages, hosts, first)

    def loading(self, sequence: Sequence) -> list[int]:
        """Host blocks being loaded for a sequence in a slot."""
        load = self._loads.get(sequence.slot)
        return [] if load is None else load.hosts

    def cancel(self, slot: int) -> None:
        """Cancel the load of a slot that is vacated. Copies already planned complete; the rest stay on the host."""
        load = self._loads.pop(slot, None)
        if load is not None:
            self.pool.release(load.hosts)

    def entered(self, sequence: Sequence) -> None:
        """Note that a sequence now computes from its device blocks."""
        self.cancel(sequence.slot)
        if sequence.swapped is not None:
            self.forget(sequence)

    def hold_back(self, behind: Int32Array) -> Int32Array:
        """``behind`` [num_slots] without slots whose loads are incomplete, unless no other slot has anything to
        compute."""
        if not self._loads:
            return behind
        waiting = [slot for slot, load in self._loads.items() if not 0 < load.step <= self.copied_step]
        if not waiting:
            return behind
        others = behind.copy()
        others[waiting] = 0
        return others if np.any(others) else behind

    def _send(self, step: int) -> None:
        """Let plan ``step`` carry all loads that no plan carries yet."""
        self._index.step = step
        for load in self._loads.values():
            if load.step:
                continue
            load.step = self._last_load = step
            sequence = load.sequence
            self._builder.swap_in(load.hosts, load.pages)
            self.num_in += len(load.hosts)
            full = sequence.num_cached // self._block_size  # of a swapped sequence the last one may not be
            self._index.insert_all(sequence.hashes, sequence.blocks, load.first, full, sequence.first_block)
            if each := self._windowed_pages:
                first = sequence.first_windowed
                self._index.insert_pages(sequence.hashes, sequence.windowed, first, full, first, each)

    # -- checks -------------------------------------------------------------------------------------------------------
    @property
    def num_held(self) -> int:
        """Host blocks that have an owner."""
        return self.pool.num_blocks - self.pool.num_free

    def _owned(self) -> Iterator[int]:
        for sequence in self._swapped.values():
            assert sequence.swapped is not None
            yield from sequence.swapped.hosts
        for load in self._loads.values():
            yield from load.hosts

    def check_integrity(self, occupied: Iterable[Sequence], others: Iterable[int] = ()) -> None:
        """Loads, swapped sequences, ``others`` who own blocks, and the pool agree.

        Raises:
            AssertionError: they do not.
        """
        self.pool.check_integrity(chain(self._owned(), others))
        slots = {sequence.slot: sequence for sequence in occupied}
        for slot, load in self._loads.items():
            assert slots[slot] is load.sequence, f"slot {slot}: a load of another sequence"
            assert not load.sequence.entered, f"slot {slot} computes before it is loaded"
            assert len(load.pages) == len(load.hosts)
            assert set(load.pages) <= set(load.sequence.pages)
        for sequence in self._swapped.values():
            swapped = sequence.swapped
            assert swapped is not None
            assert swapped.replica == self._replica, f"sequence {sequence.id} is swapped out elsewhere"
            assert not sequence.entered, f"sequence {sequence.id} runs and is swapped out"
            end, each = -(-swapped.num_tokens // self._block_size), self._windowed_pages
            assert len(swapped.host_blocks) == end - swapped.first_block
            assert len(swapped.windowed_hosts) == (end - swapped.first_windowed) * each
