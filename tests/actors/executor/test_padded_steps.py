"""Steps that are padded for CUDA graphs, and steps in pieces, on a CPU: what the graphs hold is computed instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from actors.executor.buckets import Bucket, Buckets
from actors.executor.graphs import Graphs, padded_pass
from actors.executor.layers.attention import KernelPass
from actors.executor.models import Piece
from actors.executor.pieces import Pieces
from actors.executor.runner import Runner
from actors.executor.step_work import StepWork
from actors.executor.upload import Uploader
from bus.messages import StepResult
from kernels.paged_attention import AttentionShape
from tests.actors.executor.small_engine import MAX_TOKENS, outputs
from tests.engine_driver import Driver


class EagerGraphs(Graphs):
    """Runs what the graph of a bucket holds, instead of the graph, with garbage wherever no input of the step is."""

    def __init__(self, buckets: Buckets) -> None:
        super().__init__(buckets)
        self.replayed: set[Bucket] = set()

    def bucket(self, work: StepWork) -> Bucket | None:
        return self.buckets.fitting(work)

    def replay(self, runner: Runner, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        self.replayed.add(bucket)
        for inputs in (runner._input_ids, runner._positions, runner._slot_mapping, runner._context_lens):
            inputs.fill_(10**6)
        return padded_pass(runner, bucket)


@pytest.fixture
def padded(driver: Driver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EagerGraphs:
    """The driver's engine runs padded steps of up to 6 rows and 40 tokens, with decodes apart unless told otherwise."""
    runner, apart = driver.engine._loaded.runner, getattr(request, "param", True)
    buckets = Buckets(6, 40, 4, decodes_apart=apart)
    monkeypatch.setattr(driver.engine._loaded.batch, "_decodes_apart", apart)
    limits = runner.limits
    uploader = Uploader(torch.device("cpu"), limits.max_num_seqs, 4096, 1, max_spans=buckets.largest().spans)
    graphs = EagerGraphs(buckets)
    monkeypatch.setattr(runner, "buckets", buckets)
    monkeypatch.setattr(runner, "uploader", uploader)
    monkeypatch.setattr(runner, "graphs", graphs)
    monkeypatch.setattr(runner.model, "_begin", partial(KernelPass, runner._ops, AttentionShape(4, 2, 32, 4)))
    return graphs


@pytest.mark.parametrize(("budget", "padded"), [(3, True), (16, True), (24, False), (40, True)], indirect=["padded"])
def test_padded_steps_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int
) -> None:
    """What a CUDA graph computes for a bucket is right for the decodes and prompts it is padded from."""
    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert {bucket.spans > 0 for bucket in padded.replayed} == {True, budget == 24}


def test_padded_steps_with_extras_and_scores_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """Rows that are sampled again, log probabilities of outputs and of prompts, beside plain rows."""

    def run() -> list[tuple[list[int], list[float]]]:
        scheduler, bits = driver.scheduler(24), {}
        kinds: list[dict[str, Any]] = [
            {}, {"logit_bias": {7: 3.0}, "temperature": 0.5, "top_k": 9}, {"logprobs": 2}, {"prompt_logprobs": 1}
        ]  # fmt: skip
        crowd = [scheduler.add(prompt, MAX_TOKENS, **kinds[i % 4]) for i, prompt in enumerate(prompts)]

        def collect(result: StepResult) -> None:
            for row, value in zip(
                result.logprob_rows.tolist(), result.logprob_bits.view(np.float32).tolist(), strict=True
            ):
                bits.setdefault(int(result.sequence_ids[row]), []).append(value)

        driver.drive(scheduler, on_result=collect)
        return [(sequence.output, bits.get(sequence.sequence_id, [])) for sequence in crowd]

    plain = run()
    graphs = request.getfixturevalue("padded")
    again = run()

    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in plain]
    for (_, scores), (_, wanted) in zip(again, plain, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-4)
    assert any(bucket.spans for bucket in graphs.replayed)


class EagerPieces(EagerGraphs):
    """Runs every step with prompts in pieces, padded to ``SIZE`` tokens: each is computed where its graph would be."""

    SIZE = 64

    def bucket(self, work: StepWork) -> Bucket | None:
        return None if work.decode_only else Bucket(0, self.SIZE, pieces=True)

    def piece(self, runner: Runner, bucket: Bucket, num_tokens: int) -> Piece:
        self.replayed.add(bucket)
        model, config, size = runner.model, runner.model.config, bucket.tokens
        residual = torch.full((size, config.hidden_size), torch.nan)
        qkv = torch.full((size, config.num_heads + 2 * config.num_kv_heads, config.head_dim), torch.nan)

        class Computed:
            """Leaves behind what the graph of a layer's piece does."""

            def __init__(self, index: int) -> None:
                self.index = index

            def replay(self) -> None:
                given = residual if self.index else None
                for kept, found in zip(
                    (residual, qkv), model.piece(self.index, given, None, runner.tokens(size)), strict=True
                ):
                    kept.copy_(found)

        graphs = [Computed(index) for index in range(config.num_layers)]
        return Pieces(graphs, residual, [qkv] * len(graphs)).of(num_tokens)


@pytest.mark.parametrize("budget", [5, 17, 64])
def test_steps_in_pieces_have_the_same_tokens(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], padded: EagerGraphs, budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What lies between attentions may be padded, with garbage behind the tokens of rows of any kind."""
    runner = driver.engine._loaded.runner
    pieces = EagerPieces(runner.buckets)
    monkeypatch.setattr(runner, "graphs", pieces)

    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert pieces.replayed == {Bucket(0, pieces.SIZE, pieces=True)}
