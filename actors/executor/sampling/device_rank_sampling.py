"""Sampling over ranks on GPUs: nothing waits on the host, and all of it may be in a CUDA graph.

As :mod:`pagebus.actors.executor.sampling.rank_sampling`, but rows with limits, and log probabilities, are computed from
all logits: these go between GPUs faster than the host can find out which candidates suffice.
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
        agreement, part = self._agreement, self._part
        if any_random and any_truncation:
            tokens = self._ops.sample(
                self._all(logits), slots, temperature, top_k, top_p, min_p, seeds, indexes, any_random=True,
                any_truncation=True,
            )  # fmt: skip
            return agreement.exchange(tokens)[0]  # rank 0's, should sums of others have been rounded otherwise
        wanted = Wanted(slots, indexes, temperature, seeds)
        told = agreement.comm.all_gather(chunk_scores(logits, part, wanted, any_random=any_random))
        return rank_best(agreement.exchange(part_best(logits, told, part, wanted, any_random=any_random)))

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """As `token_logprobs_reference`."""
        return self._ops.token_logprobs(self._all(logits), tokens, num_top)

    def sorted_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """The same, with any number of alternatives."""
        return self._ops.sorted_logprobs(self._all(logits), tokens, num_top)

    def _all(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of all ranks."""
        return self._agreement.comm.gather_columns(logits, self._widths)
