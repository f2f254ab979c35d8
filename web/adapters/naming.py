"""Errors of a chat in the names of the API that its client speaks, which has sent none of the chat's own fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagebus.web.http.errors import ApiError

Names = Sequence[tuple[str, str]]
"""Beginnings of paths of a chat, as expressions, and what stands there in the other API. The first that fits counts."""
_TOOLS: Names = ((r"tools\[(\d+)\]\.function\b", r"tools[\1]"), (r"tool_choice\.function\b", "tool_choice"))
_MAX_TOKENS = r"max_(completion_)?tokens$"
RESPONSE_NAMES: Names = (
    (_MAX_TOKENS, "max_output_tokens"),
    (r"messages\b.*", "input"),  # they begin with instructions, and with what was said before
    *_TOOLS,
    (r"response_format(\.json_schema)?\b", "text.format"),
    (r"verbosity$", "text.verbosity"),
    (r"reasoning_effort$", "reasoning.effort"),
)
MESSAGE_NAMES: Names = (
    (_MAX_TOKENS, "max_tokens"),
    (r"tools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
    *_TOOLS,
    (r"stop\b", "stop_sequences"),
    (r"response_format(\.json_schema)?\b", "output_config.format"),
    (r"user$", "metadata.user_id"),
)
TURN_NAMES: Names = (*MESSAGE_NAMES, (r"messages\b.*", "messages"))
"""The same for a chat that has been made: its messages are others in number than the client's."""


@contextmanager
def naming(names: Names) -> Iterator[None]:
    """Rename the fields in errors."""
    try:
        yield
    except ApiError as error:
        rename(error, names)
        raise


def rename(error: ApiError, names: Names) -> ApiError:
    """``error``, whose field is named as in the other API, also where its text repeats the name."""
    old = error.param or ""
    for pattern, there in names:
        new, count = re.subn(f"^{pattern}", there, old)
        if count:
            # "messages" is also a word: only what looks like a name is one in the middle of a sentence.
            place = r"(?<![\w.])%s(?!\w|\.\w|\[)" if "_" in old else "^%s(?=:)"
            error.rename(new, re.sub(place % re.escape(old), new, error.message))
            break
    return error
