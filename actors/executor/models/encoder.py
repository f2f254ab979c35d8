"""The network of encoders (BERT, RoBERTa, XLM-R): a prompt at once, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.pooling.encoder_layer import BiasedNorm, EncoderLayer
from pagebus.actors.executor.pooling.head import NoHead, PooledHead
from pagebus.actors.model.config import ModelConfig
from pagebus.bus.messages.segments import SEGMENT_SHIFT, TOKEN_MASK
from pagebus.kernels.attention.choice import AttentionChooser


class Encoder(Network):
    """Embeddings of token, position and segment, a norm, the layers. Its tensors are uninitialised until weights are
    loaded."""

    def __init__(self, config: ModelConfig, parameters: Parameters, ops: Ops, chooser: AttentionChooser,
                 num_positions: int) -> None:  # fmt: skip
        super().__init__(config, chooser, parameters, num_positions)
        spec, encoder = config.spec, config.spec.encoder
        assert encoder is not None
        assert config.pooler is not None
        self._spec = encoder
        rows = {"word": spec.vocab, "position": encoder.positions, "token_type": encoder.types}
        self._tokens, self._positions, self._segments = (
            parameters.matrix({f"model.embeddings.{name}_embeddings.weight": count}, spec.hidden)
            for name, count in rows.items()
        )
        self._norm = BiasedNorm(parameters, "model.embeddings.LayerNorm", spec.hidden, spec.norm.eps)
        self._layers = [
            EncoderLayer(spec, layer, parameters, f"model.encoder.layer.{index}", ops)
            for index, layer in enumerate(spec.layers)
        ]
        self._head = NoHead()
        self.pooled_head = PooledHead(config.pooler, spec.hidden, parameters, None)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """In this block a pass goes through the last layer only: others launch the same kernels."""
        layers = self._layers
        self._layers = layers[-1:]
        try:
            yield
        finally:
            self._layers = layers

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch,
        pause: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:  # fmt: skip
        """input_ids [T], with the segments of tokens in them, and positions [T] -> hidden states [T, H], or [N, H] of
        the batch's last tokens. The cache is neither read nor written."""
        spec = self._spec
        places = (positions + spec.first).clamp_(max=spec.positions - 1)
        x = self._tokens[input_ids & TOKEN_MASK] + self._positions[places]
        x = self._norm(x + self._segments[(input_ids >> SEGMENT_SHIFT).clamp_(max=spec.types - 1)])
        for layer in self._layers:
            pause()
            x = layer(x, batch.query_start, batch.longest)
        return x if batch.last is None else x.index_select(0, batch.last.index)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> zeros float32 [R, few]."""
        return self._head(hidden)
