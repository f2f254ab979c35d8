"""Limits on what a client may send, in one table. Ranges of sampling parameters stand where they are read."""

from __future__ import annotations

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

MAX_PROMPTS = 1024
"""Prompts in one call to ``/v1/completions``."""
MAX_INPUTS = 2048
"""Inputs in one call to ``/v1/embeddings`` and the like: as many as OpenAI takes."""
MAX_N = 64
"""Choices per prompt."""
MAX_CHOICES = 4096
"""Choices of one call, over all its prompts."""
MAX_MESSAGES = 4096
MAX_ABORTS = 4096
"""Ids in one call of ``/abort_requests``."""
MAX_CONTENT_PARTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_LOGPROB_TOKEN_IDS = 128
"""Tokens whose log probabilities a client may ask for at each place."""
MAX_BEAM_LOGPROBS = 128
"""Alternatives per token with ``use_beam_search``."""
MAX_PROMPT_LOGPROBS = 256
"""Alternatives per token of a prompt, where a server allows more than usual: all of a prompt is computed at once."""
MAX_PATTERN_SIZE = 4096
"""Tokens of a pattern whose repetition ends an output."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 1024
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_NAME_CHARS = 256
"""Characters of ``user``, ``cache_salt``, a message's ``name`` and the like."""
MAX_ID_CHARS = 128
ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
"""Characters of a request's id, where the client gives it."""
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_CHARS = 512
MAX_TEMPLATE_CHARS = 2**16
MAX_TOOLS = 128
MAX_TOOL_CALLS = 16
"""Calls in one answer that must have some (``tool_choice: required``)."""
MAX_DOCUMENTS = 128
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_KWARGS_DEPTH = 4
MAX_TEMPLATE_KWARGS_NODES = 256
MAX_SCHEMA_BYTES = 128 * 1024
"""Length of a JSON schema, an expression or a grammar that constrains an output, and of one function's parameters."""
MAX_SCHEMA_DEPTH = 64
MAX_CHOICE_STRINGS = 4096
MAX_SPECULATIVE_TOKENS = 16
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""vLLM only asks for more than 0; beyond these, float32 logits overflow."""

MAX_JSON_DEPTH = 64
"""How deep objects and arrays may be nested in a field of a body."""
MIN_BODY_BYTES = 4 * 2**20
MAX_BODY_BYTES = 64 * 2**20
BODY_BYTES_PER_TOKEN = 16
BYTES_PER_BRACKET = 16
"""A body may have one array or object (or bracket in its texts) for each of so many bytes of the largest body. An empty
one is two bytes long but takes a hundred in memory, and nothing else runs while all of them are made."""
LONG_BODY_BYTES = 2**18
"""Longer bodies take milliseconds to check."""
MANY_PROMPTS = 128
"""Messages and answers for more prompts take milliseconds to make."""
LONG_ANSWER_NUMBERS = 2**14
"""Answers with more log probabilities take milliseconds to write."""
MAX_LINE_BYTES = 8190
"""Bytes of the request line, and of a header."""
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 10.0
"""Seconds for the rest of a request's head once its first byte has arrived."""
KEEPALIVE_S = 75.0
"""Seconds for which a connection may be silent between requests."""
BODY_TIMEOUT_S = 30.0
TURN_BODY_BYTES = 2**16
"""Longer bodies of one client are read one at a time."""
BODY_STALL_S = 0.05
"""Seconds without further bytes after which a body loses its turn until more arrive."""
READ_S_PER_BYTE = 2e-9
"""Approximate processor time to receive a body."""
MAX_WAITING_BODIES = 2048
"""Long bodies that wait for their turn, of all clients; each has some 400 KB in buffers."""
MAX_BODIES_BYTES = 512 * 2**20
"""Bytes of all bodies that are being read at once."""
BYTES_PER_TOKEN = 4
"""Assumed bytes per token before a text is tokenized: about right for English; other languages have more tokens."""
MESSAGE_TOKENS = 4
"""Assumed tokens that a chat template adds to a message."""
UNSTATED_OUTPUT_TOKENS = 2048
"""Output tokens charged for a call without ``max_tokens``: few answers come near what the context allows."""
MAX_TIMEOUT_S = 86400.0
WRITE_TIMEOUT_S = 30.0
"""Seconds for which a client may read nothing of what is written to it."""
SEND_BUFFER_BYTES = 128 * 1024
"""Kernel buffer per connection: what a stuck client "receives" before it is noticed."""


def max_body_bytes(max_model_len: int | None) -> int:
    """Largest request body: room for a full context as token ids (up to 8 characters each), and some more."""
    wanted = BODY_BYTES_PER_TOKEN * (max_model_len or 0)
    return min(max(wanted, MIN_BODY_BYTES), MAX_BODY_BYTES)


def brackets_problem(body: bytes | bytearray, max_bytes: int) -> str:
    """Why a body has more arrays and objects than are read; "" if it has not. ``max_bytes`` is the largest body."""
    most = max_bytes // BYTES_PER_BRACKET
    if len(body) <= most or body.count(b"[") + body.count(b"{") <= most:
        return ""
    return f"may have at most {most} arrays and objects."
