"""Requests whose scheduler or detokenizer is gone must not hang for ever: they fail after a grace time.

Which detokenizer serves a request is not known here, so the loss of any makes every open request suspect; a suspect
that makes progress once the grace time is over was not stranded and is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable

from web.calls import OpenRequest


def stranded(requests: Iterable[OpenRequest], losses: int, now_s: float, grace_s: float) -> list[OpenRequest]:
    """The requests that were open when an actor was lost and have had no progress for ``grace_s`` since then."""
    found = []
    for request in requests:
        if request.losses_seen != losses:
            request.losses_seen = losses
            request.suspect_since_s = now_s
        since_s = request.suspect_since_s
        if since_s is None:
            continue
        if request.last_progress_s > since_s + grace_s:
            request.suspect_since_s = None
        elif now_s - max(since_s, request.last_progress_s) > grace_s:
            found.append(request)
    return found
