"""The steps that are run before an engine is ready."""

from __future__ import annotations

import pytest

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.loading.warmup import full_prompt_steps, long_steps, small_steps


@pytest.mark.parametrize("max_num_seqs", [1, 3, 256])
@pytest.mark.parametrize("max_model_len", [1, 2, 3, 4, 20, 5000])
@pytest.mark.parametrize("budget", [1, 2, 16, 8192])
def test_warm_up_plans_fit_any_limits(max_num_seqs: int, max_model_len: int, budget: int) -> None:
    """The steps that measure memory and compile kernels obey the rules of every plan, on a cache of one block."""
    limits = BatchLimits(max_num_seqs, max_model_len, budget, 16, num_blocks=1, vocab_size=50)
    batch = PersistentBatch(limits)

    for plan in full_prompt_steps(limits) + long_steps(limits):
        batch.reset()
        assert batch.apply(plan).num_tokens <= budget
    for group in small_steps(limits, thorough=True):
        batch.reset()
        for plan in group:
            batch.apply(plan)
