"""An executor without a model, which believes nothing: every plan is checked against what the messages promise.

Its cache holds, at each position of each block, the chained hash of all tokens up to that position, written when the
position was computed. Before a row computes, everything it attends to must hold exactly the hashes of its own tokens:
any mistake with blocks (shared, stale, never written, written by somebody else) shows at once. The next token is a
function of the last hash, so a wrong token cannot go unseen either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.bus.messages import END_LENGTH, END_NONE, END_STOP, NewSequence, StepPlan, StepResult
from tests.actors.scheduler.fake_disk import UNWRITTEN, FakeDisk
from tests.actors.scheduler.fake_model import PAST, VOCAB, candidates, next_token, remember
from tests.actors.scheduler.moves.fake_pulls import FakePulls


@dataclass
class Slot:
    new: NewSequence
    tokens: list[int]
    blocks: list[int | None]
    """None: behind the window when it entered."""
    windowed: list[list[int] | None]
    """Of each block its pages of layers with windows, where others have none."""
    computed: int
    prefixes: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


@dataclass
class FakeExecutor:
    """Takes plans with :meth:`submit`; :meth:`run_one` executes the next and returns its result."""

    name: str = "gpu-0"
    epoch: int = 2
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_model_len: int = 128
    budget: int = 64
    depth: int = 2
    scheduler_epoch: int = 1
    vocab: int = VOCAB
    num_host_blocks: int = 0
    copy_lag: int = 0
    copy_tokens: float = 1.0
    """What copying a block costs, in tokens of prefill."""
    window: int = 0
    """How many tokens the model looks back on, the newest included; 0: all."""
    windowed_pages: int = 0
    windowed_tokens: int = 0
    """As of :class:`ReplicaJoined`. These pages hold the hash and the number of the page."""
    disk: FakeDisk = field(default_factory=FakeDisk)
    """It outlives the executor."""
    stages: int = 1
    """As of :class:`ReplicaJoined`."""
    pulls: FakePulls = field(default_factory=FakePulls)
    step_s: float = 0.0
    """How long it says that each step takes."""

    def __post_init__(self) -> None:
        self.depth = max(self.depth, self.stages + 1) if self.stages > 1 else self.depth
        self.cache = np.full((self.num_blocks, self.block_size), UNWRITTEN, np.uint64)
        self.host = np.full((self.num_host_blocks, self.block_size), UNWRITTEN, np.uint64)
        self.num_copied = [0, 0]
        self.disk.begin(self.host, self.name, self.epoch)
        self.pulls.begin(self.cache, self.host, self.name, self.epoch)
        self.slots: dict[int, Slot] = {}
        self.queue: deque[StepPlan] = deque()
        self.last_step = 0
        self.ended: set[int] = set()
        self.num_computed = 0
        self.plans: list[StepPlan] = []

    @property
    def joined(self) -> ReplicaJoined:
        return ReplicaJoined(
            replica=self.name,
            epoch=self.epoch,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.budget,
            num_host_blocks=self.num_host_blocks,
            block_bytes=int(1000 * self.copy_tokens),
            copy_bytes_per_s=1000.0,
            prefill_tokens_per_s=1.0,
            windowed_pages=self.windowed_pages,
            windowed_tokens=self.windowed_tokens,
            num_disk_blocks=self.disk.num_blocks if self.num_host_blocks else 0,
            stages=self.stages,
            kv_kind=self.pulls.kind,
            kv_address=self.pulls.address,
            kv_host=self.pulls.kv_host,
        )

    def follow(self, scheduler_epoch: int) -> None:
        """Another scheduler: its first plan finds an empty batch."""
        self.scheduler_epoch, self.last_step = scheduler_epoch, 0
        self.slots.clear()
        self.ended.clear()

    def submit(self, plan: StepPlan) -> None:
        if self.last_step:
            assert plan.step == self.last_step + 1, f"plan {plan.step} follows {self.last_step}"
        self.last_step = plan.step
        self._check_lanes(plan)
        self.queue.append(plan)
        self.plans.append(plan)
        self.pulls.take(plan, self.scheduler_epoch, at_once=True)
        assert len(self.queue) <= self.depth, "too many plans in flight"

    def _check_lanes(self, plan: StepPlan) -> None:
        """No row of a pipeline needs a token that is in flight."""
        rows = set(plan.slots.tolist()) if self.stages > 1 else set()
        for before in reversed([*self.queue, plan]):
            if before is not plan:
                assert not rows & set(before.slots[: before.num_decodes].tolist()), "a sequence is in two lanes"
            rows -= {new.slot for new in before.new_sequences}

    def run_one(self) -> StepResult:
        plan = self.queue.popleft()
        self.pulls.keep_promises(plan.step)
        self._apply(plan)
        return self._run(plan)

    def _copy(self, plan: StepPlan) -> None:
        pairs = list(zip(plan.swap_out_blocks.tolist(), plan.swap_out_hosts.tolist(), strict=True))
        for block, host in pairs:
            assert 0 <= block < self.num_blocks
            assert 0 <= host < self.num_host_blocks
            assert (self.cache[block] != UNWRITTEN).any(), f"device block {block} is copied out but was never written"
            self.host[host] = self.cache[block]
        self.num_copied[0] += len(pairs)
        cuts = dict(zip(plan.cut_slots.tolist(), plan.cut_blocks.tolist(), strict=True))
        pairs = list(zip(plan.swap_in_hosts.tolist(), plan.swap_in_blocks.tolist(), strict=True))
        for host, block in pairs:
            assert 0 <= block < self.num_blocks
            assert 0 <= host < self.num_host_blocks
            assert (self.host[host] != UNWRITTEN).any(), f"host block {host} is copied in but was never written"
            assert not any(
                block in self._seen(slot, cuts.get(number))
                for number, slot in self.slots.items()
                if number not in plan.freed_slots
            )
            self.cache[block] = self.host[host]
        self.num_copied[1] += len(pairs)
        self.disk.take(plan, self.scheduler_epoch)
        self.pulls.take(plan, self.scheduler_epoch)

    def _apply(self, plan: StepPlan) -> None:
        self._copy(plan)
        for slot in plan.freed_slots.tolist():
            assert slot in self.slots, f"slot {slot} is freed but empty"
            self.ended.discard(self.slots.pop(slot).new.sequence_id)
        tokens, blocks = plan.new_token_ids.tolist(), plan.new_block_ids.tolist()
        each, windowed = self.windowed_pages, plan.new_windowed.tolist()
        for new in plan.new_sequences:
            count = (new.first_block + new.num_blocks - new.first_windowed) * each
            said = new.num_tokens - new.first_token
            self._enter(new, tokens[:said], blocks[: new.num_blocks], windowed[:count])
            del tokens[:said], blocks[: new.num_blocks], windowed[:count]
        assert not tokens
        assert not windowed
        assert not blocks
        for slot, keep in zip(plan.cut_slots.tolist(), plan.cut_blocks.tolist(), strict=True):
            assert 0 <= keep < len(self.slots[slot].blocks)
            del self.slots[slot].blocks[keep:]
            del self.slots[slot].windowed[keep:]
        windowed = plan.appended_windowed.tolist()
        assert len(windowed) == each * len(plan.appended_slots)
        for slot, block in zip(plan.appended_slots.tolist(), plan.appended_blocks.tolist(), strict=True):
            assert all(0 <= page < self.num_blocks for page in (block, *windowed[:each]))
            self.slots[slot].blocks.append(block)
            self.slots[slot].windowed.append(windowed[:each])
            del windowed[:each]
        for block in plan.copy_sources.tolist():
            assert (self.cache[block] != UNWRITTEN).any(), f"device block {block} is copied but was never written"
        self.cache[plan.copy_targets] = self.cache[plan.copy_sources]
        for new in plan.new_sequences:
            self._recall(self.slots[new.slot])
        for slot, token in zip(plan.chosen_slots.tolist(), plan.chosen_tokens.tolist(), strict=True):
            self._choose(self.slots[slot], token)

    def _choose(self, state: Slot, token: int) -> None:
        """The slot's table may be another beam's: its past is what the cache holds."""
        assert state.computed == len(state.tokens) - 1, "a token is chosen that was not the last"
        last = state.computed - 1
        prefix = int(self.cache[state.blocks[last // self.block_size], last % self.block_size])
        past, prefixes = _past(prefix, state.computed)
        state.tokens, state.prefixes = [*past, token], [*prefixes, remember(prefix, token)]
        assert state.tokens[: len(state.prompt)] == state.prompt, "a beam of another request"

    def _enter(self, new: NewSequence, tokens: list[int], blocks: list[int], windowed: list[int]) -> None:
        assert 0 <= new.slot < self.max_num_seqs
        assert new.slot not in self.slots, f"slot {new.slot} is taken"
        assert new.sequence_id not in {each.new.sequence_id for each in self.slots.values()}
        assert len(tokens) == new.num_tokens - new.first_token
        assert 0 <= new.first_token <= new.num_computed_tokens
        assert new.num_prompt_tokens <= new.num_tokens < new.max_total_tokens <= self.max_model_len
        assert 0 <= new.num_computed_tokens < new.num_tokens
        assert len(set(blocks)) == len(blocks) == new.num_blocks
        assert new.first_block * self.block_size <= self._oldest(new.num_computed_tokens), "a hole in the window"
        oldest, each = self._oldest(new.num_computed_tokens, self.windowed_tokens), self.windowed_pages
        assert new.first_windowed * self.block_size <= oldest, "a hole in the window of some layers"
        assert len(set(blocks + windowed)) == len(blocks) + len(windowed)
        pages: list[list[int] | None] = [None] * (new.first_windowed if each else len(blocks))
        pages += [windowed[at : at + each] for at in range(0, len(windowed), each or 1)]
        slot = Slot(new, tokens, [None] * new.first_block + blocks, pages, new.num_computed_tokens)
        assert len(pages) == len(slot.blocks) or not each
        self.slots[new.slot] = slot

    def _recall(self, state: Slot) -> None:
        """The tokens that were not said of a sequence that enters are those of the cache."""
        prefix, last, said = 0, state.new.first_token - 1, state.tokens
        if last >= 0:
            block = state.blocks[last // self.block_size]
            assert block is not None, "nobody knows what was not said"
            prefix = int(self.cache[block, last % self.block_size])
            past, state.prefixes = _past(prefix, last + 1)
            state.tokens = past + said
        for token in said:
            prefix = remember(prefix, token)
            state.prefixes.append(prefix)
        state.prompt = state.tokens[: state.new.num_prompt_tokens]

    def _run(self, plan: StepPlan) -> StepResult:
        counts = plan.num_scheduled.tolist()
        assert len(set(plan.slots.tolist())) == len(counts)
        assert sum(counts) <= self.budget, "beyond the token budget"
        seen = {slot: self._seen(state) for slot, state in self.slots.items()}
        writes = [self._row(slot, count, seen) for slot, count in zip(plan.slots.tolist(), counts, strict=True)]
        for row, slot in enumerate(plan.slots.tolist()):
            state = self.slots[slot]
            is_decode = counts[row] == 1 and state.computed + 1 == len(state.tokens)
            assert is_decode == (row < plan.num_decodes), f"row {row}: decodes must come first"
        for state, positions in writes:  # all rows attend to what earlier steps wrote, and to their own tokens
            for position in positions:
                block = state.blocks[position // self.block_size]
                self.cache[block, position % self.block_size] = state.prefixes[position]
                for page, content in self._pages(state, position):
                    self.cache[page, position % self.block_size] = content
            state.computed = positions.stop
        return self._sample(plan)

    def _row(self, slot: int, count: int, seen: dict[int, set[int | None]]) -> tuple[Slot, range]:
        """What a row writes, after what must be true of it. ``seen``: by slot, what something to come may read."""
        state = self.slots[slot]
        positions = range(state.computed, state.computed + count)
        assert count >= 1
        assert positions.stop <= len(state.tokens), "computes tokens that are not there"
        assert positions.stop < state.new.max_total_tokens, "computes beyond the end"
        assert positions.stop <= len(state.blocks) * self.block_size, "computes beyond its blocks"
        before = np.arange(self._oldest(positions.start), positions.start)
        if len(before):
            first = before[0] // self.block_size
            blocks = np.array(state.blocks[first : before[-1] // self.block_size + 1])
            held = self.cache[blocks[before // self.block_size - first], before % self.block_size]
            expected = np.array(state.prefixes[before[0] : positions.start], np.uint64)
            for position in before[held != expected]:
                raise AssertionError(f"slot {slot}: wrong content at position {position}")
        assert not self.pulls.written & {state.blocks[position // self.block_size] for position in positions}
        written = {state.blocks[position // self.block_size] for position in positions}
        if self.windowed_pages:
            for position in range(self._oldest(positions.start, self.windowed_tokens), positions.start):
                for page, content in self._pages(state, position):
                    held = int(self.cache[page, position % self.block_size])
                    assert held == content, f"slot {slot}: wrong content at position {position} of page {page}"
            written.update(page for position in positions for page, _ in self._pages(state, position))
        for number, other in self.slots.items():
            if other is not state:
                assert not written & seen[number], f"slot {slot} writes into {other.new.sequence_id}'s block"
        return state, positions

    def _pages(self, state: Slot, position: int) -> list[tuple[int, int]]:
        """The pages of layers with windows that hold a position, where others have none, and what they hold of it."""
        if not self.windowed_pages:
            return []
        pages = state.windowed[position // self.block_size]
        assert pages is not None, f"position {position} lies behind the window of some layers"
        return [(page, (state.prefixes[position] + number) % 2**64) for number, page in enumerate(pages, 1)]

    def _oldest(self, computed: int, window: int | None = None) -> int:
        """The first token that the next query sees."""
        window = self.window if window is None else window
        return max(0, computed - window + 1) if window else 0

    def _seen(self, slot: Slot, cut: int | None = None) -> set[int | None]:
        """Pages of a sequence, of its first ``cut`` blocks, that something to come may read. Beams may go back to any
        place."""
        goes_back = slot.new.sampling.logprobs is not None
        first = 0 if goes_back else self._oldest(slot.computed) // self.block_size
        seen = set(slot.blocks[first:cut])
        first = 0 if goes_back else self._oldest(slot.computed, self.windowed_tokens) // self.block_size
        return seen.union(*(pages for pages in slot.windowed[first:cut] if pages is not None))

    def _sample(self, plan: StepPlan) -> StepResult:
        rows: list[tuple[int, int, int, int]] = []
        tops: list[tuple[int, np.ndarray, np.ndarray]] = []
        for slot in plan.slots.tolist():
            state, new = self.slots[slot], self.slots[slot].new
            if state.computed < len(state.tokens):
                continue
            token = next_token(state.prefixes[-1])
            index = len(state.tokens) - new.num_prompt_tokens
            state.tokens.append(token)
            state.prefixes.append(remember(state.prefixes[-1], token))
            if new.sequence_id in self.ended:
                continue
            end = END_NONE
            if token in new.end_token_ids and index >= new.sampling.min_tokens:
                end = END_STOP
            elif len(state.tokens) == new.max_total_tokens:
                end = END_LENGTH
            if end != END_NONE:
                self.ended.add(new.sequence_id)
            if new.sampling.logprobs is not None:
                tops.append((len(rows), *candidates(state.prefixes[-2], new.sampling.logprobs)))
            rows.append((new.sequence_id, token, index, end))
        self.num_computed += int(plan.num_scheduled.sum())
        return self._result(plan, rows, tops)

    def _result(
        self, plan: StepPlan, rows: list[tuple[int, ...]], tops: list[tuple[int, np.ndarray, np.ndarray]]
    ) -> StepResult:
        """What the plan gave: (sequence, token, index, end) of each row, and drafts if the executor speculates."""
        columns = np.array(rows, np.int32).reshape(-1, len(rows[0]) if rows else 4).T
        return StepResult(
            step=plan.step,
            scheduler_epoch=self.scheduler_epoch,
            received_s=0.0,
            launched_s=0.0,
            done_s=self.step_s * plan.step,
            num_computed_tokens=int(plan.num_scheduled.sum()),
            sequence_ids=columns[0],
            token_ids=columns[1],
            token_indexes=columns[2],
            ends=columns[3],
            num_drafts=columns[4] if len(columns) > 4 else np.empty(0, np.int32),
            copied_step=max(0, plan.step - self.copy_lag),
            logprob_rows=np.array([row for row, _, _ in tops], np.int32),
            logprob_bits=np.array([bits[0] for _, _, bits in tops], np.int32),
            top_counts=np.array([len(ids) for _, ids, _ in tops], np.int32),
            top_ids=np.concatenate([ids for _, ids, _ in tops]) if tops else np.empty(0, np.int32),
            top_bits=np.concatenate([bits for _, _, bits in tops]) if tops else np.empty(0, np.int32),
        )


def _past(prefix: int, count: int) -> tuple[list[int], list[int]]:
    """The tokens of which the cache holds the last one's prefix, and the prefixes of all."""
    tokens, prefixes = [], []
    for _ in range(count):
        prefixes.append(prefix)
        prefix, token = PAST[prefix]
        tokens.append(token)
    assert prefix == 0, "the cache holds the end of another sequence"
    return tokens[::-1], prefixes[::-1]
