"""Qwen2 and 2.5: Llama with biases on query, key and value, which the configuration's ``attention_bias`` says."""

from __future__ import annotations

from pagebus.actors.executor.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """Nothing but the biases (and perhaps windows in the upper layers) differs."""
