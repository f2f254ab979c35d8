"""What CUDA graphs hold, computed where they would be replayed: padded steps on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.batch.upload import Uploader
from pagebus.actors.executor.graphs.graphs import Graphs, Passes, padded_pass
from pagebus.actors.executor.graphs.head_passes import Guess, HeadPass
from pagebus.actors.executor.graphs.piecewise_graphs import PiecewiseGraphs, run_piece
from pagebus.actors.executor.graphs.resampling import Resampling
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.models import Model
from pagebus.actors.executor.models.decoder import Decoder, as_decoder
from pagebus.actors.executor.models.draft_model import DraftModel
from pagebus.actors.executor.step.runner import Runner
from pagebus.kernels.attention.choice import AttentionChooser
from pagebus.kernels.common.target import Target
from tests.helpers.engine_driver import Driver


class EagerGraphs(Graphs):
    """Runs what the graph of a bucket holds, instead of the graph, with garbage wherever no input of the step is."""

    def __init__(self, buckets: Buckets, runner: Runner) -> None:
        super().__init__(buckets)
        self.runner = runner
        self.replayed: set[Bucket] = set()
        self.resampled: set[Resampling] = set()
        self.head_passes: set[HeadPass] = set()
        self._logits = torch.empty(0)

    def bucket(self, work: StepWork, *, adapted: bool = False) -> Bucket | None:
        found = self.buckets.fitting(work)
        return None if found is None else replace(found, adapted=adapted)

    def run(self, bucket: Bucket, runner: Passes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert isinstance(runner, Runner)
        self.replayed.add(bucket)
        inputs = runner.inputs
        for each in (inputs.input_ids, inputs.positions, inputs.slot_mappings, inputs.context_lens):
            each.fill_(10**6)
        hidden, self._logits, sampled = padded_pass(runner, bucket)
        return hidden, self._logits, sampled

    def can_verify(self) -> bool:
        return True

    def guess(self, count: int) -> Guess | None:
        return next((Guess(rows) for rows in self.buckets.row_sizes(count)), None)

    def run_head(self, wanted: HeadPass) -> bool:
        self.head_passes.add(wanted)
        assert self.runner.head is not None
        inputs = self.runner.head._inputs
        for each in (inputs.input_ids, inputs.positions, inputs.slot_mappings, inputs.context_lens):
            each.fill_(10**6)
        self.runner.head.run(wanted)
        return True

    def can_resample(self, wanted: Resampling) -> bool:
        return True

    def resample(self, wanted: Resampling, runner: Passes, logits: torch.Tensor) -> torch.Tensor:
        assert logits is self._logits
        assert wanted.bucket.rows == len(logits)
        self.resampled.add(wanted)
        return runner.sample_with_extras(wanted.extras, logits, any_random=True)


def computed_pieces(runner: Runner, size: int) -> PiecewiseGraphs:
    """What the graphs of the pieces of ``size`` tokens hold, with garbage wherever nothing was computed."""
    model, config = runner.model, runner.model.config
    residual = torch.full((size, config.hidden_size), torch.nan)
    qkv = torch.full((size, config.num_heads + 2 * config.num_kv_heads, config.head_dim), torch.nan)

    class Computed:
        """Leaves behind what the graph of a layer's piece does."""

        def __init__(self, index: int) -> None:
            self.index = index

        def replay(self) -> None:
            given = residual if self.index else None
            found = run_piece(as_decoder(model), self.index, given, runner.tokens(size))
            for kept, each in zip((residual, qkv), found, strict=True):
                kept.copy_(each)

    graphs = [Computed(index) for index in range(config.num_layers)]
    return PiecewiseGraphs(graphs, residual, [qkv] * len(graphs))


def use_eager_graphs(driver: Driver, monkeypatch: pytest.MonkeyPatch, buckets: Buckets) -> EagerGraphs:
    """The engine, which is on a CPU, pads its steps to these buckets."""
    runner = driver.engine._loaded.runner
    graphs = EagerGraphs(buckets, runner)
    pad_steps(runner, monkeypatch, buckets, graphs)
    return graphs


def pad_steps(runner: Runner, monkeypatch: pytest.MonkeyPatch, buckets: Buckets, graphs: Graphs) -> None:
    """A runner on a CPU runs from these ``graphs``."""
    uploader = Uploader(
        torch.device("cpu"), runner.limits.max_num_seqs, 4096, 1, max_spans=buckets.most_spans,
        max_samples=runner.limits.most_samples,
    )  # fmt: skip
    if runner.drafting is not None:
        monkeypatch.setattr(runner.drafting, "_header", uploader.header)
    if runner.head is not None:
        monkeypatch.setattr(runner.head, "_header", uploader.header)
        rooms = torch.zeros(buckets.largest().tokens, dtype=torch.int32)
        monkeypatch.setattr(runner.head._inputs, "context_lens", rooms)
    monkeypatch.setattr(runner, "buckets", buckets)
    monkeypatch.setattr(runner, "uploader", uploader)
    monkeypatch.setattr(runner, "graphs", graphs)
    for model in filter(lambda each: isinstance(each, Decoder), _models(runner)):
        setup = replace(model.chooser.setup, target=Target(80, 108))
        shape = attention_shape(model.config, setup.dtype, setup.cache_dtype)
        monkeypatch.setattr(model, "_begin", AttentionPasses(runner._ops, shape, AttentionChooser(setup)).begin)


def _models(runner: Runner) -> Iterator[Model]:
    """Those that compute a step: perhaps one that drafts beside its own."""
    yield runner.model
    if runner.head is not None and isinstance(runner.head.head, DraftModel):
        yield runner.head.head.model
