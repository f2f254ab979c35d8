"""Work beside the event loop."""

from __future__ import annotations

import threading
import weakref

import pytest

from pagebus.web.http.errors import ApiError
from pagebus.web.http.offload import offload


class Body:
    """What is worked on."""


@pytest.mark.parametrize("from_another", [False, True])
async def test_nothing_is_left_of_what_is_refused(from_another: bool) -> None:
    """The refusal does not hold what it is about, for the collector of garbage to find and free on the loop."""
    refused: list[weakref.ref[Body]] = []

    def work() -> None:
        body = Body()
        refused.append(weakref.ref(body))
        try:
            raise ValueError("wrong")
        except ValueError:
            if from_another:
                raise ApiError(400, "It is wrong.") from None
        raise ApiError(400, "It is wrong.")

    with pytest.raises(ApiError, match="It is wrong") as caught:
        await offload(work)
    assert caught.value.status == 400
    assert [body() for body in refused] == [None]


async def test_what_is_long_is_done_in_a_thread() -> None:
    """And what is short here; a failure that is no refusal keeps its frames."""
    assert await offload(threading.current_thread, long=False) is threading.main_thread()
    assert await offload(threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError) as caught:
        await offload(lambda: 1 // 0)
    assert caught.traceback[-1].name == "<lambda>"
