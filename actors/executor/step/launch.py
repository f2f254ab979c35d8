"""How a step is launched."""

from __future__ import annotations

from typing import NamedTuple

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.step.step_kernels import StepKernels
from pagebus.kernels.attention.choice import StepRows
from pagebus.kernels.attention.cudnn_prefill import LongRow


class Launch(NamedTuple):
    """How a step runs: from the graph of the ``whole`` bucket, from piecewise graphs of the bucket ``pieces``, or
    without graphs; the ``long_rows`` left to another backend; its ``rows``; and its kernels, None without rows."""

    whole: Bucket | None
    pieces: Bucket | None
    long_rows: tuple[LongRow, ...]
    rows: StepRows
    kernels: StepKernels | None
