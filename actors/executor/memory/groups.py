"""Whether a model's layers share pages of the cache by groups, as the settings want it."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings


def with_groups(settings: Settings, config: ModelConfig) -> ModelConfig:
    """The configuration with the pages that are wanted (:class:`pagebus.actors.model.cache_groups.CacheGroups`)."""
    return replace(config, grouped=not settings.disable_hybrid_kv_cache_manager)
