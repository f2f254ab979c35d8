"""Calls of many prompts go to the bus in parts, so that nobody's single request waits behind a thousand of another's.

Tokenizers and the scheduler take requests as they come: the scheduler shares what is computed among clients by weight,
but only of what it has. So of the prompts of one client's calls only so many are on their way at a time; each of which
something has come back makes room for the next. The calls of a client take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pagebus.web.calls.call import Lane, OpenRequest

MOST_AHEAD = 128
"""Prompts of one client's calls of which nothing has come back yet: as many as a tokenizer takes at once."""


class Fanout:
    """All clients of an ingress.

    Args:
        send: puts a request on its way.
    """

    def __init__(self, send: Callable[[OpenRequest], None]) -> None:
        self._send = send
        self._lanes: dict[tuple[str, int], Lane] = {}

    def submit(self, client: str, priority: int, requests: Sequence[OpenRequest]) -> None:
        """Send the requests of a call: one at once, of several what there is room for. None waits for those of another
        priority."""
        if len(requests) == 1:
            self._send(requests[0])
            return
        lane = self._lanes.setdefault((client, priority), Lane((client, priority)))
        for request in requests:
            request.lane, request.is_sent = lane, False
        lane.waiting.append(deque(requests))
        self._fill(lane)

    def come(self, request: OpenRequest) -> None:
        """Something of a request has come back, or it is over."""
        lane, request.lane = request.lane, None
        if lane is None:
            return
        if request.is_sent:
            lane.num_ahead -= 1
            self._fill(lane)
        request.is_sent = True  # if not from here, by another call that reads it

    def close(self, requests: Sequence[OpenRequest], *, goes_on: bool) -> None:
        """The call of these is over for its client; if it ``goes_on``, whatever waits of it is sent now."""
        for request in requests:
            if not request.is_sent:
                request.lane = None
                if goes_on:
                    self._put(request)
        for request in requests:
            self.come(request)

    def _fill(self, lane: Lane) -> None:
        while lane.waiting and lane.num_ahead < MOST_AHEAD:
            call = lane.waiting.popleft()
            request = call.popleft()
            if call:
                lane.waiting.append(call)
            if request.lane is not None:  # else its call is closed
                lane.num_ahead += 1
                self._put(request)
        if not lane.waiting and not lane.num_ahead:
            self._lanes.pop(lane.name, None)

    def _put(self, request: OpenRequest) -> None:
        request.is_sent = True
        self._send(request)
