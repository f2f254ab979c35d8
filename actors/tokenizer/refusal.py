"""The reason why a request is refused."""

from __future__ import annotations

from pagebus.bus.messages import GenerateRequest, RequestFailed

ERROR_TYPES = {400: "BadRequestError", 500: "InternalServerError"}


class Refusal(Exception):
    """A request that cannot be computed: HTTP ``status``, a text the client may read, the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def reply(self, request: GenerateRequest) -> RequestFailed:
        """The terminal message for ``request``."""
        return RequestFailed(
            request_id=request.request_id,
            status=self.status,
            error_type=ERROR_TYPES.get(self.status, ERROR_TYPES[500]),
            message=self.message,
            param=self.param,
        )
