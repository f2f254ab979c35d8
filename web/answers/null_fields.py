"""Fields of answers that are null unless set. Clients of vLLM and OpenAI expect them to be present."""

from __future__ import annotations

from collections.abc import Mapping

NullFields = Mapping[str, None]
NONE: NullFields = {}
TRANSFER: NullFields = {"kv_transfer_params": None}
_WHOLE: NullFields = {"service_tier": None, "system_fingerprint": None, **TRANSFER, "ec_transfer_params": None,
                      "metrics": None}  # fmt: skip
PROMPT: NullFields = {"prompt_token_ids": None, "prompt_text": None}
"""Null fields of the first chunk of a chat."""
CHAT: NullFields = {**_WHOLE, "prompt_logprobs": None, **PROMPT}
"""Null fields of a whole chat's answer, beside its choices."""
COMPLETION: NullFields = _WHOLE
MESSAGE: NullFields = {"annotations": None, "audio": None, "function_call": None, "reasoning": None}
"""Null fields of an assistant's message."""
CHAT_CHOICE: NullFields = {"token_ids": None}
COMPLETION_CHOICE: NullFields = {"token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}
COMPLETION_PART: NullFields = {"prompt_token_ids": None, "token_ids": None}
"""Null fields of a choice in a completion's chunk."""
