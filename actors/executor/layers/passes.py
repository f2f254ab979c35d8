"""Begins the attention of forward passes: which class is behind which path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.attention_pass import AttentionPass, FusedDecodePass, PagedPass, RunsPass
from pagebus.actors.executor.layers.cpu_attention import CpuPass, Scratch
from pagebus.actors.executor.layers.latent.passes import LatentPass
from pagebus.kernels.attention.choice import AttentionChooser, AttentionPath
from pagebus.kernels.attention.paged_attention import AttentionShape
from pagebus.kernels.latent.shape import LatentShape


class AttentionPasses:
    """The passes of one engine, each on the path that the ``chooser`` gives it."""

    def __init__(self, ops: Ops, shape: AttentionShape, chooser: AttentionChooser) -> None:
        self.chooser = chooser
        self._classes: dict[AttentionPath, Callable[[AttentionBatch], AttentionPass]]
        if isinstance(shape, LatentShape):
            self._classes = dict.fromkeys(AttentionPath, partial(LatentPass, ops, shape))
            return
        paged = partial(PagedPass, ops, shape)
        self._classes = {
            **dict.fromkeys(AttentionPath, paged),
            AttentionPath.RUNS: partial(RunsPass, ops, replace(shape, run=chooser.setup.run)),
            AttentionPath.FUSED_DECODE: partial(FusedDecodePass, ops, shape),
            AttentionPath.CPU: partial(CpuPass, ops, Scratch()),
        }

    def begin(self, batch: AttentionBatch) -> AttentionPass:
        """The pass of a batch, to be made before all else that the pass launches."""
        return self._classes[self.chooser.choose(batch.rows)](batch)
