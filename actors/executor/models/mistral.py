"""Mistral: Llama with a sliding window in every layer, which the configuration's ``layer_windows`` says."""

from __future__ import annotations

from pagebus.actors.executor.models.llama import LlamaModel


class MistralModel(LlamaModel):
    """Nothing but the windows differs."""
