"""What a runner needs of a model, whichever network it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.pooling.head import PooledHead
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.choice import AttentionChooser
from pagebus.kernels.quantized.coding import Kind


class Network(ABC):
    """A model whose tensors are ``parameters``. ``pooled_head`` makes of pooled states what clients get; None: they get
    the states."""

    pooled_head: PooledHead | None = None
    passage: Passage | None = None
    """Of a stage of a pipeline."""

    def __init__(
        self, config: ModelConfig, chooser: AttentionChooser, parameters: Parameters, num_positions: int
    ) -> None:
        self.config = config
        self.chooser = chooser
        self.kinds: Mapping[str, Kind | None] = {}
        """How the quantized weights of a layer in the middle are, by product; None: no kernel reads such a layout."""
        self.parameters = parameters
        self.num_positions = num_positions

    @property
    def passes_on(self) -> bool:
        """Whether what it computes is for the next stage."""
        return self.passage is not None and not self.passage.stage.last

    def pass_on(self, hidden: torch.Tensor, count: int) -> bool:
        """Leave the first ``count`` of the states of a pass to the next stage. False: they are for nobody else."""
        if self.passage is not None and self.passes_on:
            self.passage.leave(hidden[:count])
        return self.passes_on

    @abstractmethod
    def few_layers(self) -> AbstractContextManager[None]:
        """In this block a pass goes through few layers, which launch all kernels that there are."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch,
        pause: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:  # fmt: skip
        """input_ids [T] and positions [T] -> hidden states [T, H] after the last norm, or [N, H] of the batch's last
        tokens. ``pause`` is called before each layer."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 [R, V]; of a rank those of its range of the vocabulary."""
