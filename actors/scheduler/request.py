"""Requests and their sequences, as the scheduler stores them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.model.block_hash import hash_blocks, hash_next
from pagebus.actors.scheduler.beam_search import BeamSearch
from pagebus.actors.scheduler.held_blocks import HeldBlocks
from pagebus.actors.scheduler.order import INTERACTIVE, Key
from pagebus.actors.scheduler.progress import RequestProgress
from pagebus.actors.scheduler.readers import Readers
from pagebus.actors.scheduler.sequence_output import Scores
from pagebus.actors.scheduler.states import IN_SLOT, QUEUED, TRANSITIONS, State
from pagebus.bus.messages import END_NONE, AdapterSource, Int32Array, SamplingParams

SUSPECT_LOSSES, MOST_LOSSES = 2, 6
"""Consecutive executors lost under a sequence without a new token: after the first number it runs apart from other
suspects, after the second its request fails. Executors that are killed every few seconds on a busy machine took four
from under a request that was not to blame."""


@dataclass(slots=True, eq=False)
class Request(RequestProgress):
    """A client's request. It ends when all of its ``sequences`` have ended. ``queued``: none of them has run yet.

    ``priority_class`` and ``deadline_s``: its place in the order (:mod:`pagebus.actors.scheduler.order`). ``start_s``:
    its start by the fair share of its ``client``, which was charged ``num_charged`` tokens
    (:mod:`pagebus.actors.scheduler.core.fair_share`). ``num_cached``: prompt tokens found in the cache when its first
    sequence started. ``readers``: the destinations of its replies; ``away``: there is none at present. ``settled``:
    nothing of it is kept once it has ended. ``prediction``: tokens that its outputs are expected to resemble.
    ``adapter``: the adapter that its tokens are computed with; None: the model alone.
    """

    id: str
    readers: Readers
    sampling: SamplingParams
    priority_class: int
    deadline_s: float
    salt: str | None
    arrived_s: float
    prompt: array[int]
    end_token_ids: tuple[int, ...]
    sequences: list[Sequence] = field(default_factory=list)
    num_live: int = 0
    queued: bool = True
    detokenizer: str | None = None
    num_cached: int | None = None
    away: bool = False
    settled: bool = False
    client: str = ""
    weight: float = 1.0
    start_s: float = 0.0
    num_charged: int = 0
    prediction: array[int] = field(default_factory=lambda: array("i"))
    adapter: AdapterSource | None = None

    @property
    def digest(self) -> str:
        """The digest of its adapter; empty: it has none."""
        return "" if self.adapter is None else self.adapter.digest

    def charge(self, num_tokens: int, start_s: float) -> None:
        """Note the tokens charged to its client, and move its deadline to match its new start."""
        self.num_charged = num_tokens
        self.deadline_s += start_s - self.start_s
        self.start_s = start_s

    def promote(self, deadline_s: float) -> None:
        """Turn a job into an interactive request."""
        self.priority_class, self.deadline_s = INTERACTIVE, deadline_s

    def has_run(self) -> bool:
        """Mark it as not queued any more: one of its sequences runs, or none ever will. Returns whether it was."""
        was_queued, self.queued = self.queued, False
        return was_queued

    def deliver_by(self, detokenizer: str | None) -> None:
        """Have this detokenizer make its text; None: none does."""
        self.detokenizer = detokenizer

    def found_cached(self, num_tokens: int) -> None:
        """Note how many prompt tokens were cached, if this is its first start."""
        if self.num_cached is None:
            self.num_cached = num_tokens

    def client_left(self) -> None:
        """There is no client at present."""
        self.away = True

    def client_came(self) -> None:
        """There is a client again."""
        self.away = False

    def sequence_begins(self) -> None:
        """One more sequence lives."""
        self.num_live += 1

    def sequence_ends(self) -> None:
        """One sequence less lives."""
        self.num_live -= 1

    def abort(self) -> None:
        """Mark it as aborted, if it has not ended."""
        self.aborted = self.num_live > 0

    def settle(self) -> None:
        """Keep nothing of it once it has ended."""
        self.settled = True

    def close(self) -> None:
        """Count its output and drop its sequences. They refer to their request; without the cycle, both are freed at
        once."""
        self.num_output = sum(len(each.tokens) - len(self.prompt) for each in self.sequences)
        self.sequences = []


@dataclass(slots=True, eq=False)
class Sequence(HeldBlocks):
    """One growing token sequence.

    ``tokens`` holds the prompt and the known output. While it runs, its newest tokens, less than one block, are only in
    the replica's ``SlotTable``. ``hashes[i]`` is the hash of full block i, as far as computed. ``order`` is unique and
    grows with arrival. ``limit`` is the number of tokens (prompt + output) at which it ends on its present replica.
    ``last_step``: the last step that computed it in a slot that it has left. ``beam_group``: the beam group that it
    belongs to. ``started``: it has been announced to its request's detokenizer. ``end``: how its tokens ended it.
    ``scores``: log probabilities requested for it. ``num_losses``: consecutive replicas lost under it without a new
    token, counted from ``num_tokens_at_loss``.
    """

    id: int
    request: Request
    choice_index: int
    seed: int
    order: int
    limit: int
    tokens: array[int]
    hashes: list[bytes]
    state: State = State.WAITING
    slot: int = -1
    started: bool = False
    produced: bool = False
    last_step: int = 0
    leader: Sequence | None = None
    looked_up: bool = False
    scores_again: bool = False
    end: int = END_NONE
    scores: Scores = field(default_factory=Scores)
    beam_group: BeamGroup | None = None
    num_losses: int = 0
    num_tokens_at_loss: int = 0
    disk_reads: tuple[bytes, ...] | None = None
    """Contents that were read from a disk for it; None: the disk has not been searched."""
    pulls: tuple[int, ...] | None = None
    """Numbers of pulls for it since it last had a slot; None: there were none."""

    def become(self, state: State) -> None:
        """Change the state. ``TRANSITIONS`` names the module that may make each transition.

        Raises:
            AssertionError: there is no such transition.
        """
        assert (self.state, state) in TRANSITIONS, (
            f"sequence {self.id} cannot be {state.value}: it is {self.state.value}"
        )
        self.state = state

    def enter_slot(self, slot: int) -> None:
        """It has a slot."""
        self.slot = slot

    def leave_slot(self, last_step: int) -> None:
        """It has no slot any more; ``last_step`` is the last that computes it there."""
        self.slot, self.last_step = -1, last_step

    def limit_to(self, num_tokens: int) -> None:
        """End it at this length at the latest."""
        self.limit = min(self.limit, num_tokens)

    def look_up(self) -> None:
        """Its prompt was looked up in a prefix index."""
        self.looked_up = True

    def wait_for_disk(self, contents: Iterable[bytes]) -> None:
        """These are read from a disk for it."""
        self.disk_reads = tuple(contents)

    def wait_for_pulls(self, numbers: tuple[int, ...] | None) -> None:
        """These are pulled for it; None: it waits for none any more."""
        self.pulls = numbers

    def announce(self) -> None:
        """It has been announced to its request's detokenizer."""
        self.started = True

    def silence(self) -> None:
        """No detokenizer makes its text any more."""
        self.started = False

    def got_first_token(self) -> None:
        """It has produced a token."""
        self.produced = True

    def end_by(self, end: int) -> None:
        """Its tokens have ended it in this way."""
        self.end = end

    def score_again(self) -> None:
        """Have the scores of its prompt computed once more."""
        self.scores_again = True

    def search_with(self, group: BeamGroup) -> None:
        """It leads a beam search."""
        self.beam_group = group

    def fork(self, tokens: array[int], beam: int) -> None:
        """Become this beam of its group, with these tokens."""
        self.tokens, self.choice_index = tokens, beam

    def share_hashes(self, hashes: list[bytes]) -> None:
        """Its full blocks are those with these hashes."""
        self.hashes = hashes

    @property
    def entered(self) -> bool:
        """Whether it is in its executor's batch."""
        return self.state is State.ENTERED

    @property
    def in_slot(self) -> bool:
        """Whether it has a slot on a replica."""
        return self.state in IN_SLOT

    @property
    def is_queued(self) -> bool:
        """Whether it has no slot and has not ended."""
        return self.state in QUEUED

    @property
    def at_rest(self) -> State:
        """Its state without a slot once all of its tokens are known."""
        return State.WAITING if self.swapped is None else State.SWAPPED

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps blocks behind a sliding window: beams may fork from any place."""
        return self.request.sampling.beam_width > 0

    @property
    def suspect(self) -> bool:
        """Whether it may be the cause of crashes. It is then tried only on a replica without another suspect."""
        return self.num_losses >= SUSPECT_LOSSES

    def note_loss(self) -> None:
        """Count the loss of its replica. All its known tokens must be in ``tokens``."""
        progress = len(self.tokens) > self.num_tokens_at_loss
        self.num_losses = 1 if progress else self.num_losses + 1
        self.num_tokens_at_loss = len(self.tokens)
        self.disk_reads = self.pulls = None

    @property
    def head(self) -> Sequence:
        """The leader of its beam group, which is queued, admitted, preempted and ended for all beams; itself without a
        group."""
        return self if self.beam_group is None else self.beam_group.leader

    @property
    def num_slots(self) -> int:
        """Slots that it takes, with all its beams."""
        return 1 if self.beam_group is None else self.beam_group.width

    @property
    def key(self) -> Key:
        """Scheduling order: interactive requests before jobs, then the earlier deadline."""
        return self.request.priority_class, self.request.deadline_s, self.order

    @property
    def ready(self) -> bool:
        """Whether it may get a slot. Sequences of one request wait until the first has computed their shared prompt."""
        if self.state is not State.WAITING and self.state is not State.SWAPPED:
            return False
        leader = self.leader
        return leader is None or leader.produced or leader.state is State.ENDED

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt must be computed even if cached.

        It must be if log probabilities of the prompt, or the mean of its hidden states, were requested and have not all
        arrived, or may have been lost since. Only the first sequence of a request does this.
        """
        if self.choice_index or not self.request.sampling.scores_all_of_prompt:
            return False
        return self.scores_again or not self.produced

    @property
    def pooled_from(self) -> int | None:
        """Index of the first prompt token whose hidden state is requested; None if none is."""
        pooling = self.request.sampling.pooling
        if self.choice_index or not pooling:
            return None
        return len(self.request.prompt) - 1 if pooling == "last" else 0

    @property
    def pooled_until(self) -> int | None:
        """Index of the prompt token before which the requested hidden states end; None: they end with the prompt."""
        return 1 if self.request.sampling.pooling == "cls" else None

    @property
    def least_tokens(self) -> int:
        """The fewest of its missing tokens that a step must compute to be of use: all of the prompt, or one."""
        return len(self.request.prompt) if self.request.sampling.in_one_step else 1

    def begin_again(self, new_id: int, limit: int, block_size: int) -> None:
        """Reset an ended sequence to its prompt, under a new id."""
        num_prompt = len(self.request.prompt)
        del self.tokens[num_prompt:]
        del self.hashes[num_prompt // block_size :]
        self.id, self.limit = new_id, limit
        self.scores, self.end = Scores(), END_NONE

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks of ``tokens`` that have no hash yet."""
        hashes, tokens = self.hashes, self.tokens
        start, end = len(hashes) * block_size, len(tokens) - block_size
        if start > end:
            return
        if not hashes:
            hashes += hash_blocks(tokens, block_size, salt=self.request.salt, adapter=self.request.digest)
            return
        parent = hashes[-1]
        for first in range(start, end + 1, block_size):
            parent = hash_next(parent, tokens[first : first + block_size].tobytes())
            hashes.append(parent)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The sequences of one beam search (:mod:`pagebus.actors.scheduler.replica.beam_group` forks them).

    ``leader`` stands for all of them while they wait. ``ids`` are the sequence ids of the others, and ``choice_ids``
    those of the choices in the answer. ``sampling`` makes executors report candidates. While the search runs, each of
    ``members`` has a slot. ``beams[i]`` is the member of running beam i, which is its ``choice_index``, or None until a
    member has forked for it; ``parked`` are members without a beam. Candidates of ``num_missing`` beams have not
    arrived. ``top_ids`` and ``top_bits`` [beams, num_candidates] hold the candidates' tokens and the bits of their log
    probabilities.
    """

    leader: Sequence
    ids: list[int]
    choice_ids: list[int]
    search: BeamSearch
    sampling: SamplingParams
    members: list[Sequence]
    beams: list[Sequence | None] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)
    num_missing: int = 0
    top_ids: Int32Array = field(default_factory=lambda: np.empty((0, 0), np.int32))
    top_bits: Int32Array = field(default_factory=lambda: np.empty((0, 0), np.int32))

    @property
    def width(self) -> int:
        """Number of beams that continue at each step."""
        return self.search.width

    @property
    def is_complete(self) -> bool:
        """Whether every running beam has a member."""
        return None not in self.beams

    def expect(self, num_candidates: int) -> None:
        """Expect candidates of every running beam."""
        self.num_missing, shape = len(self.beams), (len(self.beams), num_candidates)
        self.top_ids, self.top_bits = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def record(self, beam: int, top_ids: Int32Array, top_bits: Int32Array) -> bool:
        """Store the candidates of one beam; returns whether those of all beams are there."""
        self.top_ids[beam], self.top_bits[beam] = top_ids, top_bits
        self.num_missing -= 1
        return not self.num_missing

    def gather(self, others: list[Sequence]) -> None:
        """The leader has a slot, and so have the ``others``, which have no beams yet."""
        self.members, self.parked = [self.leader, *others], others
        self.beams = [None] * len(self.search.scores)
        self.beams[self.leader.choice_index] = self.leader

    def start_round(self, num_beams: int) -> None:
        """The beams that continue are about to be assigned."""
        self.beams, self.parked = [None] * num_beams, []

    def disband(self) -> None:
        """Reduce the group to its leader, after all members have left their slots."""
        self.members, self.parked, self.beams = [self.leader], [], []
