"""Open requests and the calls that read their replies. Several calls can share a request with an ``Idempotency-Key``.

The system knows a request once, as sent by the most recent call. That call starts with nothing, so all text is sent
again from the first token on. Earlier calls already have some of it and take only what is new to them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pagebus.bus.messages import GenerateRequest
from pagebus.bus.messages.field_types import no_ints
from pagebus.web.calls.call import OpenRequest
from pagebus.web.http.errors import ApiError


class Readers:
    """Open requests by id. ``newest`` are those that the system was asked for last; ``earlier`` has the others, each
    dict one per id, and is nearly always empty."""

    def __init__(self) -> None:
        self.newest: dict[str, OpenRequest] = {}
        self.earlier: list[dict[str, OpenRequest]] = []

    def __iter__(self) -> Iterator[OpenRequest]:
        """All open requests."""
        for layer in (*self.earlier, self.newest):
            yield from list(layer.values())

    def of(self, request_id: str) -> list[OpenRequest]:
        """The open requests that read this one's replies."""
        return [layer[request_id] for layer in (*self.earlier, self.newest) if request_id in layer]

    def check_same(self, request: GenerateRequest) -> None:
        """Check that a request equals the one under way under its name, if there is one.

        Raises:
            ApiError: 422, it is another request.
        """
        other = self.newest.get(request.request_id)
        if other is not None and other.message is not None and not is_same(other.message, request):
            text = "A request with this idempotency key is under way, and it is not the same as this one."
            raise ApiError(422, text, param="Idempotency-Key", code="idempotency_key_in_use")

    def add(self, opened: OpenRequest) -> None:
        """Add a reader, which requests the output anew."""
        other = self.newest.get(opened.request_id)
        self.newest[opened.request_id] = opened
        if other is None:
            return
        layer = next((each for each in self.earlier if opened.request_id not in each), None)
        if layer is None:
            self.earlier.append(layer := {})
        layer[opened.request_id] = other
        opened.read_with(other)

    def remove(self, request: OpenRequest) -> bool:
        """Remove a reader. Returns whether it was one and no other call reads the request."""
        request_id = request.request_id
        layer = next((each for each in (self.newest, *self.earlier) if each.get(request_id) is request), None)
        if layer is None:
            return False
        del layer[request_id]
        if layer is self.newest and (left := self.of(request_id)):
            self._promote(left[-1])
        self.earlier = [each for each in self.earlier if each]
        return request_id not in self.newest

    def _promote(self, request: OpenRequest) -> None:
        """Make it the representative of the request."""
        for layer in self.earlier:
            if layer.get(request.request_id) is request:
                del layer[request.request_id]
        self.newest[request.request_id] = request
        request.count_here()


def is_same(one: GenerateRequest, other: GenerateRequest) -> bool:
    """Whether two messages ask for the same output, whatever their sender and time."""
    ids = one.prompt_token_ids.tobytes() == other.prompt_token_ids.tobytes()
    return ids and _what(one) == _what(other)


def _what(request: GenerateRequest) -> GenerateRequest:
    return replace(request, prompt_token_ids=no_ints(), ingress="", attempt="", arrived_s=0.0, traced=False, weight=1.0)
