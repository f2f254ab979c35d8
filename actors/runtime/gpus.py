"""Finds the machine's GPUs, and the one that an executor uses. It works without torch, which fixes its view on
import."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LIST_TIMEOUT_S = 20.0
NODES = "/dev/nvidia[0-9]*"
"""Device nodes, one per GPU, if Linux itself drives them."""


def list_gpus(*, uuids: bool = False) -> list[str]:
    """Indexes (or UUIDs) of the GPUs that nvidia-smi lists; none without that tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    field = "uuid" if uuids else "index"
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Ids for CUDA_VISIBLE_DEVICES of the GPUs that this process may use. Device nodes are counted if there are any,
    because nvidia-smi takes a good part of a second."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(len(glob.glob(NODES)))] or list_gpus()
    return [part.strip() for part in listed.split(",") if part.strip() and part.strip() != "-1"]


def take_free_gpus(folder: Path, uuids: Sequence[str], count: int = 1) -> list[str]:
    """The first ``count`` GPUs that are not taken, locked in ``folder`` until this process ends; none, and no lock, if
    there are fewer.

    Containers of a scaled service all see all GPUs; a lock on a file of a shared volume lets each take a different one.
    The kernel releases it however the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    locks: dict[str, int] = {}
    for uuid in uuids:
        if len(locks) == count:
            break
        lock = os.open(folder / f"{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        locks[uuid] = lock  # the descriptor stays open, and with it the lock
    if len(locks) < count:
        for lock in locks.values():
            os.close(lock)
        return []
    return list(locks)
