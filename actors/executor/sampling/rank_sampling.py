"""Sampling over ranks: each looks at its range of the vocabulary, and all tell each other what they found.

What all know they then compute alike, so that each has the same token. Whatever decides which exchange follows is known
to all as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.agreement import Agreement
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.sampling.rank_logprobs import RankLogprobs
from pagebus.actors.model.shards.shard import Shard, share
from pagebus.kernels.sampling.candidates import Limits, cuts_of, joined, own_candidates
from pagebus.kernels.sampling.draw import Keys, best_within, chunked, chunks_of, draw_chunk, joined_sums
from pagebus.kernels.sampling.noise import row_keys_reference
from pagebus.kernels.sampling.sampling import GREEDY_BELOW, largest_reference, thresholds_reference

CANDIDATES = 256
"""The largest logits that each rank tells of a row with limits: 1 KiB."""


def ops_of_rank(ops: Ops, agreement: Agreement, shard: Shard) -> Ops:
    """``ops`` whose sampling takes logits of the rank's range of the vocabulary, and gives tokens of all of it."""
    comm, vocab = agreement.comm, shard.whole.vocab
    owns = [share(vocab, rank, comm.size) for rank in range(comm.size)]
    own = owns[comm.rank]
    logprobs = RankLogprobs(comm, own)
    return replace(
        with_part(ops, own), sample=RankSampling(agreement, owns).sample, token_logprobs=logprobs.token_logprobs,
        sorted_logprobs=logprobs.token_logprobs, pick_logits=logprobs.pick_logits,
    )  # fmt: skip


def with_part(ops: Ops, own: range) -> Ops:
    """``ops`` whose changes to logits take those of the tokens ``own``: those of other tokens are left to others."""
    return replace(
        ops, apply_logit_rules=partial(ops.apply_logit_rules, first=own.start),
        apply_token_masks=partial(ops.apply_token_masks, first=own.start),
        apply_bad_words=partial(ops.apply_bad_words, first=own.start),
        apply_penalties=partial(ops.apply_penalties, first=own.start),
    )  # fmt: skip


class RankSampling:
    """As `sample_reference`, over ranks that have the tokens ``owns``. The device's reference: plain torch."""

    def __init__(self, agreement: Agreement, owns: list[range]) -> None:
        self._agreement, self._comm = agreement, agreement.comm
        self._owns, self._own = owns, owns[agreement.comm.rank]
        self._vocab = owns[-1].stop

    def sample(
        self, logits: torch.Tensor, slots: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
        top_p: torch.Tensor, min_p: torch.Tensor, seeds: torch.Tensor, indexes: torch.Tensor, *, any_random: bool,
        any_truncation: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens [R] int32 from this rank's logits [R, W]; all else as in `sample_reference`."""
        logits, largest = largest_reference(logits)
        scores, ids = logits.gather(1, largest.unsqueeze(1)).squeeze(1).float(), largest + self._own.start
        rows = (temperature[slots] >= GREEDY_BELOW).nonzero().squeeze(1) if any_random else slots[:0]
        if len(rows):
            mine = slots[rows]
            limits = Limits(temperature[mine], top_k[mine], top_p[mine], min_p[mine])
            part = logits[rows].float()
            scaled = part * limits.temperature.reciprocal().unsqueeze(1)
            if any_truncation:
                scaled.masked_fill_(part < self._cuts(part, limits).unsqueeze(1), -torch.inf)
            keys = row_keys_reference(seeds[mine], indexes[rows])
            scores[rows], ids[rows] = self._draw(scaled, keys)
        return self._best(scores, ids)

    def _cuts(self, part: torch.Tensor, limits: Limits) -> torch.Tensor:
        """The smallest kept logit [R] of each row, from the candidates of all ranks; of the few rows for which these do
        not suffice from all of their logits."""
        told = self._comm.all_gather(own_candidates(part, limits.temperature, CANDIDATES))
        widths = [len(own) for own in self._owns]
        cuts, exact = cuts_of(joined(told, widths), limits, self._vocab)
        rows = (~exact).nonzero().squeeze(1)
        if len(rows):
            whole = self._comm.gather_columns(part[rows], widths)
            cuts[rows] = thresholds_reference(whole, *(limit[rows] for limit in limits)).squeeze(1)
        return cuts

    def _draw(self, scaled: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """The best score and token of this rank in the chunk that all draw, [R] each; -inf where it has none of it."""
        chunks, numbers = chunked(scaled, self._own.start), [chunks_of(own) for own in self._owns]
        widest = max(map(len, numbers))
        sums = F.pad(chunks.logsumexp(2), (0, widest - chunks.shape[1]), value=-torch.inf)
        told = self._comm.all_gather(sums)
        chosen = draw_chunk(joined_sums(list(zip(numbers, told, strict=True)), numbers[-1].stop), keys)
        scores, ids = best_within(chunks, chosen, keys, numbers[self._comm.rank].start)
        return scores, ids.clamp(self._own.start, self._own.stop - 1)

    def _best(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The token [R] int32 with the best score of any rank's, of equal ones that of the first rank."""
        told = self._agreement.exchange(torch.stack([scores.view(torch.int32), ids.int()]))
        winners = told[:, 0].contiguous().view(torch.float32).argmax(0, keepdim=True)
        return told[:, 1].gather(0, winners).squeeze(0)
