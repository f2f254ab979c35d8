"""Settings of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagebus.actors.settings.combinations.roles import AUTO, num_prefill

if TYPE_CHECKING:
    from pagebus.actors.model.config import ModelConfig
    from pagebus.actors.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Settings of the core.

    ``epoch`` is the scheduler's lease epoch; it keeps the sequence ids of two schedulers apart. Without ``priorities``
    all requests have the same priority. ``priority_aging_s`` is the wait equal to one step of priority. A request whose
    client is away is kept for ``resume_timeout_s``. ``vocab_size`` None disables checks of token ids.
    ``max_num_scheduled_tokens`` bounds a step, whatever the replica's own budget. ``window``: the most tokens that any
    layer of the model looks back on, itself included; 0: all. ``num_prefill`` replicas compute long prompts for the
    others (:mod:`pagebus.actors.scheduler.fleet.roles`); with ``auto_roles`` as many as the load suggests
    (:mod:`pagebus.actors.scheduler.fleet.auto_roles`).
    """

    block_size: int = 16
    pipeline_depth: int = 2
    max_num_queued_requests: int = 4096
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    priorities: bool = True
    priority_aging_s: float = 30.0
    itl_target_s: float | None = None
    ttft_target_s: float | None = None
    epoch: int = 1
    eos_token_ids: tuple[int, ...] = ()
    resume_timeout_s: float = 30.0
    vocab_size: int | None = None
    max_num_scheduled_tokens: int | None = None
    window: int = 0
    num_prefill: int = 0
    auto_roles: bool = False

    @classmethod
    def of(cls, settings: Settings, model: ModelConfig, epoch: int) -> CoreConfig:
        """The configuration for a deployment's settings and model."""
        return cls(
            block_size=settings.block_size,
            pipeline_depth=settings.pipeline_depth,
            max_num_queued_requests=settings.max_num_queued_requests,
            enable_prefix_caching=settings.enable_prefix_caching,
            preemption_mode=settings.preemption_mode,
            priorities=settings.scheduling_policy == "priority",
            priority_aging_s=settings.priority_aging_s,
            itl_target_s=_seconds(settings.itl_target_ms),
            ttft_target_s=_seconds(settings.ttft_target_ms),
            epoch=epoch,
            eos_token_ids=model.eos_token_ids,
            resume_timeout_s=settings.resume_timeout_s,
            vocab_size=model.vocab_size,
            max_num_scheduled_tokens=settings.max_num_scheduled_tokens,
            window=model.kept_window,
            num_prefill=num_prefill(settings.roles),
            auto_roles=settings.roles == AUTO,
        )


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000
