"""Sends calls with many prompts to the bus in parts, so that they do not delay other clients' requests.

Tokenizers and the scheduler process requests in order of arrival. The scheduler shares computation among clients by
weight, but only among requests that have reached it. The number of one client's prompts on their way is therefore
limited. Each prompt whose first reply arrives makes room for the next. The calls of a client take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagebus.web.calls.call import OpenRequest, PromptQueue

MOST_AHEAD = 128
"""The most prompts of one client's calls that are sent without a reply: as many as a tokenizer takes at once."""


class Fanout:
    """All clients of an ingress.

    Args:
        send: puts a request on its way.
    """

    def __init__(self, send: Callable[[OpenRequest], None]) -> None:
        self._send = send
        self._queues: dict[tuple[str, int], PromptQueue] = {}

    def submit(self, client: str, priority: int, requests: Sequence[OpenRequest]) -> None:
        """Send the requests of a call: one at once, several as far as there is room. Priorities do not wait for each
        other."""
        if len(requests) == 1:
            self._send(requests[0])
            return
        queue = self._queues.setdefault((client, priority), PromptQueue((client, priority)))
        queue.add(requests)
        self._fill(queue)

    def on_reply(self, request: OpenRequest) -> None:
        """Make room for the next prompt: a request has its first reply, or is over."""
        queue = request.leave_queue()
        if queue is None:
            return
        if request.is_sent:
            queue.replied()
            self._fill(queue)
        request.mark_sent()  # if not from here, by another call that reads it

    def close(self, requests: Sequence[OpenRequest], *, goes_on: bool) -> None:
        """End a call for its client. If it ``goes_on``, its queued prompts are sent now."""
        for request in requests:
            if not request.is_sent:
                request.leave_queue()
                if goes_on:
                    self._put(request)
        for request in requests:
            self.on_reply(request)

    def _fill(self, queue: PromptQueue) -> None:
        while queue.waiting and queue.num_ahead < MOST_AHEAD:
            if (request := queue.next()) is not None:
                self._put(request)
        if not queue.waiting and not queue.num_ahead:
            self._queues.pop(queue.name, None)

    def _put(self, request: OpenRequest) -> None:
        request.mark_sent()
        self._send(request)
