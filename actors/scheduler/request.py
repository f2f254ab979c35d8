"""A request and its sequences, as the scheduler sees them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from pagebus.actors.model.block_hash import hash_blocks, hash_next, hashes_from_array
from pagebus.actors.scheduler.beam_search import BeamSearch, Count, peak_blocks
from pagebus.actors.scheduler.order import INTERACTIVE, JOB, Key, Order, arrival
from pagebus.actors.scheduler.readers import Reader, Readers
from pagebus.actors.scheduler.sequence_output import Scores
from pagebus.actors.scheduler.states import IN_SLOT, QUEUED, TRANSITIONS, State
from pagebus.bus.messages import END_NONE, AlsoReads, Int32Array, SamplingParams, TokenizedRequest

SEQUENCE_IDS = 2**20
"""Ids of sequences that live at the same time differ modulo this."""
SUSPECT_LOSSES, MOST_LOSSES = 2, 4
"""Executors lost in a row under a sequence without a token of it: from when it is tried apart from others like it, and
when its request is given up."""


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for. It ends when all its ``sequences`` have. ``queued``: none of them has run yet.

    ``level`` and ``due_s``: its place in the order (see :mod:`pagebus.actors.scheduler.order`). ``start_s``: when it
    starts by the share of its ``client``, which it has been charged for ``num_charged`` tokens
    (:mod:`pagebus.actors.scheduler.core.fair_share`).
    ``num_cached``: tokens of its prompt that were in the cache when its first sequence started. ``readers``: where the
    replies go to; ``away``: nowhere at present. ``settled``: nothing is to be kept once it has ended.

    Only to be shown, or told to its ingress if it is ``traced``: ``priority``, when what happened (0: it has not),
    ``num_preemptions`` of its sequences, their tokens once it is over (``num_output``), whether it was ``aborted``.
    """

    id: str
    readers: Readers
    sampling: SamplingParams
    level: int
    due_s: float
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
    priority: int = 0
    taken_s: float = 0.0
    tokenized_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_preemptions: int = 0
    num_output: int = 0
    aborted: bool = False
    client: str = ""
    weight: float = 1.0
    start_s: float = 0.0
    num_charged: int = 0
    traced: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """The first ``num_tokens`` tokens of a preempted sequence lie in ``host_blocks`` of the replica of this name, the
    last of them perhaps in part of a block."""

    replica: str
    host_blocks: list[int]
    num_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing token sequence.

    ``tokens`` holds prompt and known output; while it runs, the newest tokens (less than one block) are with
    the replica's ``SlotTable`` only. ``hashes[i]`` is the hash of full block i, as far as
    they have been computed. ``replica`` is the name of the one it runs on, ``blocks`` its block table there. ``order``
    is unique and grows with arrival. ``limit`` is the number of tokens (prompt + output) at which it ends, on its
    present replica.
    ``copied``: the block whose content it takes over with the next plan (as it enters, if it has not), held until then,
    and the block of its own that gets it. ``num_losses``: replicas lost under it in a row without a token in between,
    when it had ``num_tokens_at_loss``. ``beam_group``: of a beam search, the beams that it is one of. ``started``: its
    request's detokenizer knows it. ``end``: how its tokens ended it, if they did; ``scores``: what clients asked to
    know of them.
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
    replica: str | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    started: bool = False
    produced: bool = False
    last_step: int = 0
    leader: Sequence | None = None
    looked_up: bool = False
    copied: tuple[int, int] | None = None
    swapped: Swapped | None = None
    scores_again: bool = False
    end: int = END_NONE
    scores: Scores = field(default_factory=Scores)
    beam_group: BeamGroup | None = None
    num_losses: int = 0
    num_tokens_at_loss: int = 0

    def become(self, state: State) -> None:
        """Change its state; ``TRANSITIONS`` says who may.

        Raises:
            AssertionError: there is no such transition.
        """
        assert (self.state, state) in TRANSITIONS, (
            f"sequence {self.id} cannot be {state.value}: it is {self.state.value}"
        )
        self.state = state

    @property
    def entered(self) -> bool:
        """It is in its executor's batch."""
        return self.state is State.ENTERED

    @property
    def in_slot(self) -> bool:
        """It has a slot of a replica."""
        return self.state in IN_SLOT

    @property
    def is_queued(self) -> bool:
        """It has no slot, and has not ended."""
        return self.state in QUEUED

    @property
    def at_rest(self) -> State:
        """The state that it has without a slot, once all of its tokens are known."""
        return State.WAITING if self.swapped is None else State.SWAPPED

    @property
    def suspect(self) -> bool:
        """It may be what ends executors: it is tried again only where no other suspect is."""
        return self.num_losses >= SUSPECT_LOSSES

    def note_loss(self) -> None:
        """The replica that it ran on is gone. (All its known tokens are here.)"""
        progress = len(self.tokens) > self.num_tokens_at_loss
        self.num_losses = 1 if progress else self.num_losses + 1
        self.num_tokens_at_loss = len(self.tokens)

    @property
    def head(self) -> Sequence:
        """The sequence that waits, is admitted, preempted and ended for all beams of its search; or itself."""
        return self if self.beam_group is None else self.beam_group.leader

    @property
    def num_slots(self) -> int:
        """How many slots it takes, with all its beams."""
        return 1 if self.beam_group is None else self.beam_group.width

    @property
    def key(self) -> Key:
        """Scheduling order: interactive requests before jobs, then by what is due first."""
        return self.request.level, self.request.due_s, self.order

    @property
    def ready(self) -> bool:
        """It may be given a slot. Sequences of one request let the first compute their prompt, then share it."""
        if self.state is not State.WAITING and self.state is not State.SWAPPED:
            return False
        leader = self.leader
        return leader is None or leader.produced or leader.state is State.ENDED

    @property
    def scores_prompt(self) -> bool:
        """Its prompt has to be computed even if it is cached: log probabilities of the prompt, or the mean of its
        states, are wanted, and have not all come yet, or may have been lost since. One sequence does so for its whole
        request."""
        if self.choice_index or not self.request.sampling.scores_all_of_prompt:
            return False
        return self.scores_again or not self.produced

    @property
    def pooled_from(self) -> int | None:
        """The first token of its prompt whose hidden state is wanted."""
        pooling = self.request.sampling.pooling
        if self.choice_index or not pooling:
            return None
        return 0 if pooling == "mean" else len(self.request.prompt) - 1

    def begin_again(self, new_id: int, limit: int, block_size: int) -> None:
        """It has ended, and is computed once more from its prompt on, under another id."""
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
            hashes += hash_blocks(tokens, block_size, salt=self.request.salt)
            return
        parent = hashes[-1]
        for first in range(start, end + 1, block_size):
            parent = hash_next(parent, tokens[first : first + block_size].tobytes())
            hashes.append(parent)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The sequences of one beam search: which is which beam (:mod:`pagebus.actors.scheduler.replica.beam_group` says
    how they fork).

    ``leader`` stands for all of them as long as they wait; ``ids`` are those of the others, ``choice_ids`` those under
    which the answer is told. ``sampling`` makes executors report candidates. While the search runs, each of its
    ``members`` has a slot: ``beams[i]`` is the member of running beam i, which is its ``choice_index``, None where it
    has still to follow, and ``parked`` are members without a beam. The candidates of ``num_missing`` beams have not
    come; of the others ``top_ids`` and ``top_bits`` [beams, num_candidates] hold the tokens and their log
    probabilities' bits.
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
        """How many beams go on."""
        return self.search.width

    @property
    def is_complete(self) -> bool:
        """Whether every running beam has its member."""
        return None not in self.beams

    def disband(self) -> None:
        """All have left their slots: the leader goes on, or ends, for all."""
        self.members, self.parked, self.beams = [self.leader], [], []


def blocks_needed(request: Request, num_tokens: Count, block_size: int) -> Count:
    """Blocks in which ``num_tokens`` computed tokens of a request, or of each of its beams, always fit."""
    return peak_blocks(len(request.prompt), num_tokens, max(1, request.sampling.beam_width), block_size)


def seed_of(request_id: str, sampling: SamplingParams, choice_index: int) -> int:
    """The sampling seed of one sequence: the client's, or one derived from the request id, plus the choice index;
    a signed 64-bit number."""
    seed = sampling.seed
    if seed is None:
        seed = int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "little")
    return (seed + choice_index + 2**63) % 2**64 - 2**63


def make_request(
    message: TokenizedRequest, eos_token_ids: tuple[int, ...], order: Order, others: Iterable[AlsoReads] = ()
) -> Request:
    """The request without its sequences. End tokens are the client's and, unless ignored, the model's."""
    sampling = message.sampling
    ends = dict.fromkeys(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(dict.fromkeys(eos_token_ids))
    return Request(
        id=message.request_id,
        readers=Readers(
            *(Reader(each.ingress, each.attempt, each.asked) for each in others),
            Reader(message.ingress, message.attempt, message.asked),
        ),
        sampling=sampling,
        level=JOB if message.is_job else INTERACTIVE,
        due_s=order.due_s(message.arrived_s, message.priority, is_job=message.is_job),
        salt=message.cache_salt,
        arrived_s=message.arrived_s,
        prompt=array("i", message.prompt_token_ids.tobytes()),
        end_token_ids=tuple(ends),
        priority=message.priority,
        taken_s=message.taken_s,
        tokenized_s=message.tokenized_s,
        client=message.client,
        weight=message.weight,
        start_s=arrival(message.arrived_s),
        traced=message.traced,
    )


def prompt_hashes(message: TokenizedRequest, block_size: int) -> list[bytes]:
    """The hashes of the prompt's full blocks: the tokenizer's, or our own where its block size was another."""
    prompt = message.prompt_token_ids
    if len(message.block_hashes) == len(prompt) // block_size * 4:
        return hashes_from_array(message.block_hashes)
    return hash_blocks(prompt, block_size, salt=message.cache_salt)
