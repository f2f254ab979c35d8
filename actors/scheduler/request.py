"""Requests and their sequences, as the scheduler stores them."""

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
from pagebus.bus.messages import END_NONE, AdapterSource, AlsoReads, Int32Array, SamplingParams, TokenizedRequest

SEQUENCE_IDS = 2**20
"""Ids of sequences that live at the same time differ modulo this."""
SUSPECT_LOSSES, MOST_LOSSES = 2, 6
"""Consecutive executors lost under a sequence without a new token: after the first number it runs apart from other
suspects, after the second its request fails. Executors that are killed every few seconds on a busy machine took four
from under a request that was not to blame."""


@dataclass(slots=True, eq=False)
class Request:
    """A client's request. It ends when all of its ``sequences`` have ended. ``queued``: none of them has run yet.

    ``priority_class`` and ``deadline_s``: its place in the order (:mod:`pagebus.actors.scheduler.order`). ``start_s``:
    its start by the fair share of its ``client``, which was charged ``num_charged`` tokens
    (:mod:`pagebus.actors.scheduler.core.fair_share`). ``num_cached``: prompt tokens found in the cache when its first
    sequence started. ``readers``: the destinations of its replies; ``away``: there is none at present. ``settled``:
    nothing of it is kept once it has ended. ``prediction``: tokens that its outputs are expected to resemble.
    ``adapter``: what its tokens are computed with beside the model.

    Reported only: ``priority``, the times of its stages (0: not reached yet), ``num_preemptions`` of its sequences, how
    many drafts were verified and accepted in slots that these have left (``num_drafted``, ``num_accepted``),
    ``num_output``, their output tokens once it is over, and ``aborted``. ``traced``: its ingress gets these times.
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
    priority: int = 0
    taken_s: float = 0.0
    tokenized_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_output: int = 0
    aborted: bool = False
    client: str = ""
    weight: float = 1.0
    start_s: float = 0.0
    num_charged: int = 0
    traced: bool = False
    prediction: array[int] = field(default_factory=lambda: array("i"))
    adapter: AdapterSource | None = None

    @property
    def digest(self) -> str:
        """That of its adapter; empty: it has none."""
        return "" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """A preempted sequence's copy in the host tier: its first ``num_tokens`` tokens lie in ``host_blocks`` of this
    replica, from its block ``first_block`` on. The last block may be partly filled. ``windowed_hosts``: what the
    sequence had in ``windowed``, from block ``first_windowed`` on."""

    replica: str
    host_blocks: list[int]
    num_tokens: int
    first_block: int = 0
    windowed_hosts: list[int] = field(default_factory=list)
    first_windowed: int = 0

    @property
    def hosts(self) -> list[int]:
        """All host blocks."""
        return self.host_blocks + self.windowed_hosts


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing token sequence.

    ``tokens`` holds the prompt and the known output. While it runs, its newest tokens, less than one block, are only in
    the replica's ``SlotTable``. ``hashes[i]`` is the hash of full block i, as far as computed. ``replica`` names the
    replica that it runs on, and ``blocks`` is its block table there, from its block ``first_block`` on: those before
    lie behind the model's sliding window and are not held. Where only some layers have a window, ``blocks`` are pages
    of the others, and ``windowed`` those of the layers with one: block by block from ``first_windowed`` on, each as
    many pages as its replica has ``windowed_pages``. ``order`` is unique and grows with arrival. ``limit`` is the
    number of tokens (prompt + output) at which it ends on its present replica.

    ``copied``: a pending copy on write of a block as (source pages, own pages), made by the next plan; the sources are
    retained until then. ``num_losses``: consecutive replicas lost under it without a new token, counted from
    ``num_tokens_at_loss``. ``beam_group``: the beam group that it belongs to. ``started``: its request's detokenizer
    has been sent it. ``end``: how its tokens ended it. ``scores``: log probabilities requested for it.
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
    first_block: int = 0
    windowed: list[int] = field(default_factory=list)
    first_windowed: int = 0
    num_cached: int = 0
    started: bool = False
    produced: bool = False
    last_step: int = 0
    leader: Sequence | None = None
    looked_up: bool = False
    copied: tuple[list[int], list[int]] | None = None
    swapped: Swapped | None = None
    scores_again: bool = False
    end: int = END_NONE
    scores: Scores = field(default_factory=Scores)
    beam_group: BeamGroup | None = None
    num_losses: int = 0
    num_tokens_at_loss: int = 0
    disk_reads: tuple[bytes, ...] | None = None
    """What has been read from a disk for it; None: the disk has not been searched."""
    pulls: tuple[int, ...] | None = None
    """What has been pulled from other replicas for it since it had a slot; None: nothing was."""

    def become(self, state: State) -> None:
        """Change the state. ``TRANSITIONS`` names the module that may make each transition.

        Raises:
            AssertionError: there is no such transition.
        """
        assert (self.state, state) in TRANSITIONS, (
            f"sequence {self.id} cannot be {state.value}: it is {self.state.value}"
        )
        self.state = state

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
    def end_block(self) -> int:
        """How many blocks its table has room for on this replica, with those before ``first_block``."""
        return self.first_block + len(self.blocks)

    @property
    def pages(self) -> list[int]:
        """All that it holds of the device's pool."""
        return self.blocks + self.windowed if self.windowed else self.blocks

    @property
    def first_kept(self) -> int:
        """The first block of which it holds all pages."""
        return max(self.first_block, self.first_windowed)

    def give_back(self, keep: int, windowed_pages: int) -> list[int]:
        """Remove the pages of layers with windows before block ``keep`` from its table, and return them."""
        if windowed_pages:
            count = (keep - self.first_windowed) * windowed_pages
            gone, self.windowed, self.first_windowed = self.windowed[:count], self.windowed[count:], keep
            return gone
        count = keep - self.first_block
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.first_block = keep
        return gone

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps blocks behind a sliding window: beams may fork from any place."""
        return self.request.sampling.beam_width > 0

    @property
    def suspect(self) -> bool:
        """Whether it may be what crashes executors. It is then tried only on a replica without another suspect."""
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
        """Index of the first prompt token whose hidden state is not requested any more; None: there is none."""
        return 1 if self.request.sampling.pooling == "cls" else None

    @property
    def least_tokens(self) -> int:
        """Tokens without which a step is of no use to it, of those that it lacks: all, or one."""
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

    def disband(self) -> None:
        """Reduce the group to its leader, after all members have left their slots."""
        self.members, self.parked, self.beams = [self.leader], [], []


def blocks_needed(request: Request, num_tokens: Count, block_size: int) -> Count:
    """Blocks that always suffice for ``num_tokens`` computed tokens of a request, or of each of its beams."""
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
        priority_class=JOB if message.is_job else INTERACTIVE,
        deadline_s=order.deadline_s(message.arrived_s, message.priority, is_job=message.is_job),
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
        prediction=array("i", message.prediction_token_ids.tobytes()),
        adapter=message.adapter,
    )


def prompt_hashes(message: TokenizedRequest, block_size: int) -> list[bytes]:
    """Hashes of the prompt's full blocks: the tokenizer's, or recomputed here if its block size differs."""
    prompt = message.prompt_token_ids
    if len(message.block_hashes) == len(prompt) // block_size * 4:
        return hashes_from_array(message.block_hashes)
    digest = "" if message.adapter is None else message.adapter.digest
    return hash_blocks(prompt, block_size, salt=message.cache_salt, adapter=digest)
