"""What transformers' beam search gives, for tests of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def reference_beams(
    model: Any,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    end_ids: Sequence[int] = (),
    *,
    min_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[list[int], float]]:
    """The tokens of each beam, end token included, and its score by transformers, the best first."""
    ids = torch.tensor([list(prompt)])
    pad = next(token for token in range(model.config.vocab_size) if token not in end_ids)
    model.generation_config.eos_token_id = list(end_ids) or None
    model.generation_config.pad_token_id = pad
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens or None,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = []
    for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [place for place, token in enumerate(tokens) if token in end_ids and place >= min_tokens]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return beams
