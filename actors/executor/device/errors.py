"""Errors that end an engine."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot start or cannot go on; the text names the cause. A plan that breaks the rules is one."""


class PlanError(EngineError):
    """A step plan that contradicts the executor's state: an error of the scheduler, found before a kernel ran."""


class EngineStalled(EngineError):
    """Steps do not advance: the device hangs, or waits for something that never comes."""


def is_device_fault(error: BaseException | None) -> bool:
    """Whether ``error`` (or its cause) came from the device: it may be unusable for this process, and hang its end."""
    while error is not None:
        if isinstance(error, EngineStalled):
            return True
        kind = type(error).__name__
        text = str(error) if isinstance(error, RuntimeError) else ""
        if kind == "AcceleratorError" or "CUDA error" in text or "Triton Error [CUDA]" in text:
            return True
        error = error.__cause__
    return False
