"""Programmatic dependent launch (Hopper and later): a kernel starts before the previous one on the stream has ended.

A kernel that takes part has a last parameter ``PDL: tl.constexpr``, is launched with ``**pdl(device)``, and

- calls ``gdc_wait()`` under ``if PDL:`` before it reads *or overwrites* anything that an earlier kernel of the chain
  touches; what no kernel writes (weights, tables of the model) may be loaded before that;
- may call ``gdc_launch_dependents()`` at any time: it only lets the next kernel start, which then waits for itself.

Each kernel of the chain must wait, also one that needs nothing of its predecessor: waiting is transitive, so a kernel
that does not wait would let its successor run ahead of everything before it. Kernels of libraries are ordinary edges.
``KERNELS_PDL=0`` turns it off.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from pagebus.kernels.common.target import Target, target_of

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton here, or one without it
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "pdl"]


@cache
def _supported(target: Target | None) -> bool:
    if target is None or gdc_wait is None or os.environ.get("KERNELS_PDL", "1") == "0":
        return False
    return target.capability >= 90


def pdl(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch on ``device``: ``PDL`` for the kernel, and Triton's own option with it."""
    return {"PDL": True, "launch_pdl": True} if _supported(target_of(device)) else {"PDL": False}
