"""What decides how the scheduler's core decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """``epoch`` is the scheduler's lease epoch: sequence ids of two schedulers differ. Without ``priorities`` all
    requests have the same; ``priority_aging_s`` is the wait that makes up for one step of it. A request whose client is
    away is kept for ``resume_timeout_s``. ``vocab_size`` None: token ids are not looked at."""

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
