"""The prompts of a trace as random token ids, and as requests for the bus."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pagebus.actors.simulator.recording.trace import Trace
from pagebus.bus.messages import AdapterSource, GenerateRequest, Int32Array, SamplingParams

INGRESS = "bench"
"""The ingress of these requests; its replies have no reader."""


def scaled(trace: Trace, scale: float) -> Trace:
    """The same requests with all lengths times ``scale``, for models that are too small for the published ones."""
    if scale == 1.0:
        return trace
    for name in ("prompt_tokens", "output_tokens", "max_tokens", "prefix_tokens"):
        lengths = np.maximum(np.rint(getattr(trace, name) * scale), name != "prefix_tokens")
        setattr(trace, name, lengths.astype(np.int64))
    return trace


def make_prompts(trace: Trace, vocab_size: int, seed: Sequence[int], salt: int = 0) -> list[Int32Array]:
    """Random token ids [prompt_tokens] of every request. Prompts of a group begin alike; others share nothing.

    The shared part of a group depends only on ``seed``, the rest also on ``salt``.
    """
    tails = np.random.default_rng([*seed, 0, salt])
    prompts = []
    for count, group, shared in zip(trace.prompt_tokens, trace.prefix_groups, trace.prefix_tokens, strict=True):
        num_shared = min(int(shared), int(count) - 1) if group >= 0 else 0
        prompt = tails.integers(0, vocab_size, int(count) - num_shared, dtype=np.int32)
        if num_shared:
            head = np.random.default_rng([*seed, 1, int(group)]).integers(0, vocab_size, num_shared, dtype=np.int32)
            prompt = np.concatenate([head, prompt])
        prompts.append(prompt)
    return prompts


def make_requests(
    trace: Trace,
    prompts: Sequence[Int32Array],
    name: str,
    temperature: float,
    adapters: Sequence[AdapterSource | None] = (),
) -> list[GenerateRequest]:
    """One request for each prompt, with ids ``name-0`` and so on; all of them run to their full length.

    ``adapters`` take turns; empty: the model alone.
    """
    turns = itertools.cycle(adapters or (None,))
    return [
        GenerateRequest(
            request_id=f"{name}-{index}",
            ingress=INGRESS,
            sampling=SamplingParams(max_tokens=int(output), temperature=temperature, ignore_eos=True, seed=index),
            prompt_token_ids=prompt,
            adapter=next(turns),
        )
        for index, (prompt, output) in enumerate(zip(prompts, trace.output_tokens, strict=True))
    ]
