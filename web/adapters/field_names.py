"""What the fields of a chat are called in the APIs that are translated onto chats: their clients have sent none of the
chat's own."""

from __future__ import annotations

from pagebus.web.http.naming import FieldNames

_TOOLS: FieldNames = ((r"tools\[(\d+)\]\.function\b", r"tools[\1]"), (r"tool_choice\.function\b", "tool_choice"))
_MAX_TOKENS = r"max_(completion_)?tokens$"
RESPONSE_NAMES: FieldNames = (
    (_MAX_TOKENS, "max_output_tokens"),
    (r"messages\b.*", "input"),  # they begin with instructions, and with what was said before
    *_TOOLS,
    (r"response_format(\.json_schema)?\b", "text.format"),
    (r"verbosity$", "text.verbosity"),
    (r"reasoning_effort$", "reasoning.effort"),
)
MESSAGE_NAMES: FieldNames = (
    (_MAX_TOKENS, "max_tokens"),
    (r"tools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
    *_TOOLS,
    (r"stop\b", "stop_sequences"),
    (r"response_format(\.json_schema)?\b", "output_config.format"),
    (r"user$", "metadata.user_id"),
    (r"thinking_token_budget$", "thinking.budget_tokens"),
    (r"reasoning_effort$", "output_config.effort"),
    (r"messages\b.*", "messages"),  # they are others in number than the client's
)
