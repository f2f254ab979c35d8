"""Sampling over ranks gives what one rank gives, and the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.actors.executor.device.agreement import WORDS, Agreement
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.sampling import device_rank_sampling, rank_sampling
from pagebus.actors.executor.sampling.device_rank_sampling import device_ops_of_rank
from pagebus.actors.executor.sampling.rank_sampling import ops_of_rank
from pagebus.actors.model.shards.shard import Shard, share
from pagebus.kernels.sampling import parts
from pagebus.kernels.sampling.candidates import Limits, cuts_of, joined, own_candidates
from pagebus.kernels.sampling.rank_limits import RowLimits, rank_cuts_reference
from pagebus.kernels.sampling.sampling import thresholds_reference
from tests.helpers.ranks.thread_comm import ThreadComm, together

WHOLE = Ops.reference()
SLOTS = 12
LIMITS = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.6, 0.0), (9, 0.95, 0.2), (0, 0.999, 0.0)]
"""top_k, top_p, min_p."""
HEATS = [0.0, 0.3, 1.0, 1.5]


def part_ops(comm: Comm, vocab: int) -> tuple[Ops, range]:
    shard = Shard(comm.rank, comm.size, Vocabulary(vocab))
    return ops_of_rank(WHOLE, Agreement(comm), shard), share(vocab, comm.rank, comm.size)


class Vocabulary:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab


def rows_of(seed: int, vocab: int, *, ties: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits, and what as many slots want."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(SLOTS, vocab, generator=generator) * 3
    if ties:
        logits = logits.round()
    pick = [torch.randint(size, (SLOTS,), generator=generator) for size in (len(LIMITS), len(HEATS))]
    top_k, top_p, min_p = torch.tensor(LIMITS)[pick[0]].unbind(1)
    wanted = {
        "slots": torch.randperm(SLOTS, generator=generator).int(), "temperature": torch.tensor(HEATS)[pick[1]],
        "top_k": top_k.int(), "top_p": top_p, "min_p": min_p, "seeds": torch.arange(SLOTS) * 977 + seed,
        "indexes": torch.arange(SLOTS).int(), "any_random": True, "any_truncation": True,
    }  # fmt: skip
    return logits, wanted


def test_what_is_no_number_counts_as_banned_for_all_ranks() -> None:
    """A NaN on one rank does not win over what the others have."""
    logits, wanted = rows_of(4, 129, ties=False)
    expected = WHOLE.sample(logits.index_fill(1, torch.arange(3, 129, 2), -torch.inf), **wanted)
    logits[:, 3::2] = torch.nan

    def sample(comm: ThreadComm) -> torch.Tensor:
        ops, own = part_ops(comm, 129)
        return ops.sample(logits[:, own.start : own.stop].contiguous(), **wanted)

    assert all(tokens.tolist() == expected.tolist() for tokens in together(3, sample))


@pytest.mark.parametrize("count", [4, 256])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([7, 129, 2500]), st.integers(2, 4), st.booleans())
def test_all_ranks_sample_the_token_of_one_rank(count: int, seed: int, vocab: int, world: int, ties: bool) -> None:
    """Chunks of noise and parts of the vocabulary end in different places; with few candidates some rows need all of
    their logits."""
    logits, wanted = rows_of(seed, vocab, ties=ties)

    def sample(comm: ThreadComm) -> torch.Tensor:
        ops, own = part_ops(comm, vocab)
        return ops.sample(logits[:, own.start : own.stop].contiguous(), **wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_sampling, "CANDIDATES", count)
        told = together(world, sample)
    expected = WHOLE.sample(logits, **wanted)
    for tokens in told:
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_limits_from_candidates_are_exact_or_said_not_to_be(ties: bool) -> None:
    logits, wanted = rows_of(5, 2500, ties=ties)
    limits = Limits(wanted["temperature"].clamp(min=0.3), wanted["top_k"], wanted["top_p"], wanted["min_p"])
    expected = thresholds_reference(logits, *limits).squeeze(1)
    found = []
    for count in (2, 16, 256, 2500):
        parts = logits.chunk(2, dim=1)
        told = torch.stack([own_candidates(part, limits.temperature, count) for part in parts])
        cuts, exact = cuts_of(joined(told, [part.shape[1] for part in parts]), limits, 2500)
        assert torch.equal(cuts[exact], expected[exact])
        found.append(int(exact.sum()))
    assert found == sorted(found)
    assert found[0] < found[-1] == SLOTS


def test_a_flat_row_needs_all_its_logits_and_others_do_not() -> None:
    """Where top_p reaches behind the candidates; only that row is gathered."""
    logits = torch.zeros(2, 4000)
    logits[1, 1234] = 20.0
    wanted = rows_of(0, 7, ties=False)[1] | {"slots": torch.arange(2).int(), "indexes": torch.zeros(2).int()}
    wanted |= {"temperature": torch.ones(2), "top_k": torch.zeros(2).int(), "top_p": torch.full((2,), 0.5)}
    wanted |= {"min_p": torch.zeros(2), "seeds": torch.arange(2)}

    def sample(comm: ThreadComm) -> tuple[torch.Tensor, list[Any]]:
        ops, own = part_ops(comm, 4000)
        return ops.sample(logits[:, own.start : own.stop].contiguous(), **wanted), comm.calls

    for tokens, calls in together(2, sample):
        assert tokens.tolist() == WHOLE.sample(logits, **wanted).tolist()
        assert [shape for shape, _ in calls] == [(2, 257), (1, 2000), (2, 3), (4 + WORDS,)]


def test_greedy_steps_exchange_a_token_and_its_logit() -> None:
    logits, wanted = rows_of(3, 4000, ties=True)
    wanted |= {"any_random": False, "any_truncation": False}

    def sample(comm: ThreadComm) -> tuple[torch.Tensor, list[Any]]:
        ops, own = part_ops(comm, 4000)
        return ops.sample(logits[:, own.start : own.stop].contiguous(), **wanted), comm.calls

    for tokens, calls in together(3, sample):
        assert tokens.tolist() == logits.argmax(1).tolist()  # the lowest id of equal ones
        assert calls == [((2 * SLOTS + WORDS,), "torch.int32")]


@pytest.mark.parametrize("vocab", [70, 129])
@pytest.mark.parametrize("world", [2, 3])
def test_changes_of_logits_reach_the_rank_that_has_them(vocab: int, world: int) -> None:
    logits, wanted = rows_of(8, vocab, ties=False)
    generator = torch.Generator().manual_seed(vocab)
    slots, indexes = wanted["slots"].long(), torch.full((SLOTS,), 6)
    tokens = torch.randint(vocab, (SLOTS, 20), generator=generator).int()
    prompts = torch.full((SLOTS,), 9)
    ids = torch.randint(-1, vocab, (SLOTS, 8), generator=generator).int()
    values, until = torch.randn(SLOTS, 8, generator=generator), torch.randint(9, (SLOTS, 8), generator=generator).int()
    masks = torch.randint(-(1 << 31), 1 << 31, (SLOTS, -(-vocab // 32)), generator=generator).int()
    places = torch.where(slots % 3 == 0, -1, slots)
    words, lens = torch.randint(vocab, (SLOTS, 6), generator=generator).int(), torch.zeros(SLOTS, 6).int()
    lens[:, 1], lens[:, 5] = 2, 3
    words[:, 0], words[:, 2:4] = tokens[:, 14], tokens[:, 13:15]  # both words are about to be complete
    heats = [torch.rand(SLOTS, generator=generator) + 0.5 for _ in range(3)]

    def change(ops: Ops, own: torch.Tensor) -> torch.Tensor:
        ops.apply_logit_rules(own, slots, indexes, ids, values, until)
        ops.apply_token_masks(own, places, masks)
        ops.apply_bad_words(own, tokens, slots, prompts, indexes, words, lens)
        ops.apply_penalties(own, tokens, slots, prompts, prompts + indexes, *heats)
        return own

    def changed(comm: ThreadComm) -> torch.Tensor:
        ops, own = part_ops(comm, vocab)
        return change(ops, logits[:, own.start : own.stop].clone())

    expected = change(WHOLE, logits.clone())
    assert not torch.equal(expected, logits)
    assert torch.equal(torch.cat(together(world, changed), dim=1), expected)


@pytest.mark.parametrize("num_top", [0, 5, 60])
def test_log_probabilities_are_those_of_the_whole(num_top: int) -> None:
    """Ranks and alternatives too, also more of them than a rank has tokens."""
    logits, _ = rows_of(9, 70, ties=True)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    tokens = torch.arange(SLOTS) * 6

    def score(comm: ThreadComm) -> torch.Tensor:
        ops, own = part_ops(comm, 70)
        return ops.token_logprobs(logits[:, own.start : own.stop].contiguous(), tokens, num_top)

    expected = WHOLE.token_logprobs(logits, tokens, num_top)
    bits = [0, *range(2 + num_top, 2 + 2 * num_top)]
    for told in together(2, score):
        assert torch.equal(told[:, 1 : 2 + num_top], expected[:, 1 : 2 + num_top])
        floats = [each[:, bits].contiguous().view(torch.float32) for each in (told, expected)]
        torch.testing.assert_close(*floats, equal_nan=True)


def test_picked_logits_come_from_who_has_them() -> None:
    logits, _ = rows_of(10, 70, ties=False)
    logits[2, 69] = -torch.inf
    rows, ids = torch.tensor([0, 2, 5, 5]), torch.tensor([1, 69, 34, 35])

    def pick(comm: ThreadComm) -> torch.Tensor:
        ops, own = part_ops(comm, 70)
        return ops.pick_logits(logits[:, own.start : own.stop], rows, ids)

    for told in together(2, pick):
        assert torch.equal(told, logits[rows, ids])


def cuts_of_ranks(
    logits: torch.Tensor, limits: RowLimits, vocab: int, gather: object, gather_rows: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The reference where a rank is one of several."""
    whole = gather_rows(logits, torch.ones(len(logits), dtype=torch.int32))
    assert whole.shape[1] == vocab
    return rank_cuts_reference([whole], limits)


@pytest.mark.parametrize(("any_truncation", "leaves_rows_out"), [(False, False), (True, False), (True, True)])
def test_ranks_on_devices_give_the_tokens_and_scores_of_the_whole(any_truncation: bool, leaves_rows_out: bool) -> None:
    """By the references of their kernels; what they compare is kept for the host."""
    logits, wanted = rows_of(12, 2500, ties=False)
    wanted |= {"any_truncation": any_truncation}
    expected = WHOLE.sample(logits, **wanted)
    scores = WHOLE.token_logprobs(logits, expected, 3)

    def sample(comm: ThreadComm) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        comm.leaves_rows_out = leaves_rows_out
        agreement = Agreement(comm)
        agreement.own, agreement.told = torch.tensor([7, comm.rank, 5]).int(), torch.zeros(2, 3, dtype=torch.int32)
        ops = device_ops_of_rank(WHOLE, agreement, Shard(comm.rank, comm.size, Vocabulary(2500)))
        own = share(2500, comm.rank, comm.size)
        part = logits[:, own.start : own.stop].contiguous()
        tokens = ops.sample(part, **wanted)
        return tokens.tolist(), ops.token_logprobs(part, tokens, 3), agreement.told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rank_sampling, "rank_cuts", cuts_of_ranks)
        for name in ("chunk_scores", "part_best", "rank_best"):
            patch.setattr(device_rank_sampling, name, getattr(parts, f"{name}_reference"))
        told = together(2, sample)
    for tokens, packed, agreed in told:
        assert tokens == expected.tolist()
        assert torch.equal(packed, scores)
        assert agreed.tolist() == [[7, 0, 5], [7, 1, 5]]


def test_drift_is_found_beside_the_tokens() -> None:
    """By every rank, before it has a token."""
    logits, wanted = rows_of(11, 70, ties=False)

    def sample(comm: ThreadComm) -> str:
        shard = Shard(comm.rank, comm.size, Vocabulary(70))
        agreement = Agreement(comm)
        agreement.own = torch.tensor([7, -1 - comm.rank, 6]).int()
        own = share(70, comm.rank, comm.size)
        with pytest.raises(EngineError) as caught:
            ops_of_rank(WHOLE, agreement, shard).sample(logits[:, own.start : own.stop].contiguous(), **wanted)
        return str(caught.value)

    told = together(2, sample)
    assert told == ["the ranks have drifted apart (rank 0: step 7, ffffffff, rank 1: step 7, fffffffe)"] * 2
