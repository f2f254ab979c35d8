"""Sampling over ranks on GPUs: nothing waits on the host, and all of it may be in a CUDA graph.

As :mod:`pagebus.actors.executor.sampling.rank_sampling`, but log probabilities are computed from all logits, which go
between GPUs faster than the host could wait for anything; and so are rows with limits where ranks exchange nothing
whose size the device alone knows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebus.actors.executor.device.agreement import Agreement
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.sampling.rank_logprobs import RankLogprobs
from pagebus.actors.executor.sampling.rank_sampling import with_part
from pagebus.actors.model.shards.shard import Shard
from pagebus.kernels.sampling.parts import Part, Wanted, chunk_scores, part_best, rank_best
from pagebus.kernels.sampling.rank_limits import RowLimits, rank_cuts


def device_ops_of_rank(ops: Ops, agreement: Agreement, shard: Shard) -> Ops:
    """``ops`` whose sampling takes logits of the rank's range of the vocabulary, and gives tokens of all of it."""
    comm = agreement.comm
    part = Part(comm.rank, comm.size, shard.whole.vocab)
    sampling = DeviceRankSampling(ops, agreement, part)
    return replace(
        with_part(ops, part.own), sample=sampling.sample, token_logprobs=sampling.token_logprobs,
        sorted_logprobs=sampling.sorted_logprobs, pick_logits=RankLogprobs(comm, part.own).pick_logits,
    )  # fmt: skip


class DeviceRankSampling:
    """``ops`` are those for logits of the whole vocabulary."""

    def __init__(self, ops: Ops, agreement: Agreement, part: Part) -> None:
        self._ops, self._agreement, self._part = ops, agreement, part
        self._widths = [len(part.of(rank)) for rank in range(part.world)]

    def sample(
        self, logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
        top_p: torch.Tensor, min_p: torch.Tensor, seeds: torch.Tensor, indexes: torch.Tensor, *, any_random: bool,
        any_truncation: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens [R] int32 from this rank's logits [R, W], the same on all ranks; all else as in `sample_reference`."""
        agreement, part, cuts = self._agreement, self._part, None
        if any_random and any_truncation:
            limits = RowLimits(slots, temperature, top_k, top_p, min_p)
            if not agreement.comm.leaves_rows_out:
                return self._sampled_from_all(logits, limits, seeds, indexes)
            cuts = rank_cuts(logits, limits, part.vocab, agreement.comm.all_gather, self._rows)
        wanted = Wanted(slots, indexes, temperature, seeds)
        told = agreement.comm.all_gather(chunk_scores(logits, part, wanted, any_random=any_random, cuts=cuts))
        return rank_best(agreement.exchange(part_best(logits, told, part, wanted, any_random=any_random, cuts=cuts)))

    def _sampled_from_all(
        self, logits: torch.Tensor, limits: RowLimits, seeds: torch.Tensor, indexes: torch.Tensor
    ) -> torch.Tensor:
        tokens = self._ops.sample(
            self._all(logits), *limits, seeds, indexes, any_random=True, any_truncation=True
        )  # fmt: skip
        return self._agreement.exchange(tokens)[0]  # rank 0's, should sums of others have been rounded otherwise

    def _rows(self, logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self._agreement.comm.gather_rows(logits, wanted, self._widths)

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """As `token_logprobs_reference`."""
        return self._ops.token_logprobs(self._all(logits), tokens, num_top)

    def sorted_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """The same, with any number of alternatives."""
        return self._ops.sorted_logprobs(self._all(logits), tokens, num_top)

    def _all(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of all ranks."""
        return self._agreement.comm.gather_columns(logits, self._widths)
