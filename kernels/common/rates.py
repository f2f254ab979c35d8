"""Measured rates of the kernels for long prompts, by which the executor chooses between them.

All were measured on an H200 in bfloat16 (docs/performance.md). The prefill kernel has two rates, because the
comparisons were measured under different loads: with cuDNN, alone on the GPU; with the Hopper kernel, beside products.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """``flops_per_s`` of long rows. A query that sees ``half_at`` keys is computed at half of it."""

    flops_per_s: float
    half_at: int = 0

    def seconds(self, flops: float, keys_seen: int) -> float:
        """Time for this many operations of queries that see ``keys_seen`` keys, at least 1."""
        return flops * (keys_seen + self.half_at) / (self.flops_per_s * keys_seen)


PREFILL_ALONE = Rate(450e12, 550)
"""`prefill_attention`, nothing else on the GPU."""
PREFILL_BUSY = {64: Rate(280e12, 550), 128: Rate(400e12, 550), 256: Rate(250e12, 550)}
"""`prefill_attention` under load, by the padded head's size; measured for 128 only."""
CUDNN_CAUSAL = Rate(640e12, 400)
"""cuDNN with a causal mask."""
CUDNN_PAST = Rate(660e12)
"""cuDNN without a mask, on segments of the past."""
HOPPER = {64: Rate(430e12), 128: Rate(620e12), 256: Rate(530e12)}
"""`hopper_attention` under load, by the padded head's size (measured for 128 only), beside the costs per block, row and
call that its module names."""
