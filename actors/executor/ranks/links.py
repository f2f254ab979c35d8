"""What processes of ranks say to the libraries that move tensors between GPUs. Imports no torch."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0",
}  # fmt: skip
"""NVLink multicast is never used. Ranks capture graphs at different times, so nothing that needs the others may happen
while a graph is captured: all connections are made at the beginning, and no buffers are registered."""


def avoid_multicast() -> None:
    """Set up this process, before any of them begins."""
    os.environ.update(ENVIRONMENT)
