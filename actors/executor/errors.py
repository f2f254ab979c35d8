"""What ends an engine."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot start or cannot go on; the text names the cause. A plan that breaks the rules is one."""


class PlanError(EngineError):
    """A step plan that contradicts the executor's state: an error of the scheduler, found before a kernel ran."""
