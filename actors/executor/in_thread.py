"""Runs a long call in a new thread, as a future."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[..., T], *args: object) -> Future[T]:
    """Run ``function`` in a new thread and return its result. If the caller is cancelled, as the actor ends, the result
    is dropped."""
    future: Future[T] = Future()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # it was cancelled
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name=function.__name__).start()
    return future
